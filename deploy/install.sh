#!/bin/sh
# Installs Holdfast on this machine, or brings an installed one to this version; run as root, in a
# checkout. Each step can be done by hand. With DESTDIR it only lays the files there.
#
#     deploy/install.sh               install, or upgrade: run it again
#     deploy/install.sh uninstall     remove the programs and units; settings and data stay
#
# What goes where: /opt/holdfast (programs and their virtual environment), /etc/holdfast (settings
# and credentials, yours), /usr/local/lib/systemd/system (units; your changes go to /etc/systemd).
set -eu
umask 022
cd "$(dirname "$0")/.."

DESTDIR="${DESTDIR:-}"
PYTHON="${PYTHON:-python3}"
PROGRAMS="$DESTDIR/opt/holdfast"
SETTINGS="$DESTDIR/etc/holdfast"
UNITS="$DESTDIR/usr/local/lib/systemd/system"
USERS="$DESTDIR/usr/local/lib/sysusers.d"
SERVICES="holdfast-api.socket holdfast-api.service holdfast-sweeper.service holdfast-audit.timer
holdfast-worker@embeddings.service holdfast-worker@trace-events.service"

say() { echo "holdfast: $*"; }

lay_programs() {
    say "programs to $PROGRAMS"
    mkdir -p "$PROGRAMS"
    for part in app worker migrations deploy; do
        # Beside the old one and then in its place, so that nobody reads half of it.
        rm -rf "$PROGRAMS/.$part.new"
        cp -R "$part" "$PROGRAMS/.$part.new"
        find "$PROGRAMS/.$part.new" -name __pycache__ -type d -prune -exec rm -rf {} +
        rm -rf "$PROGRAMS/.$part.old"
        if [ -e "$PROGRAMS/$part" ]; then mv "$PROGRAMS/$part" "$PROGRAMS/.$part.old"; fi
        mv "$PROGRAMS/.$part.new" "$PROGRAMS/$part"
        rm -rf "$PROGRAMS/.$part.old"
    done
    cp requirements.txt README.md LICENSE "$PROGRAMS/"
}

lay_settings() {
    mkdir -p "$SETTINGS"
    for who in owner api worker sweeper; do
        mkdir -p "$SETTINGS/credentials/$who"
    done
    chmod 0700 "$SETTINGS/credentials" "$SETTINGS/credentials"/*
    if [ ! -e "$SETTINGS/holdfast.env" ]; then
        say "settings to $SETTINGS/holdfast.env: look through them"
        cp deploy/systemd/holdfast.env.example "$SETTINGS/holdfast.env"
    fi
}

lay_units() {
    say "units to $UNITS"
    mkdir -p "$UNITS" "$USERS"
    for unit in deploy/systemd/holdfast*; do
        case "$unit" in *.example) continue ;; esac
        cp -R "$unit" "$UNITS/"
    done
    cp deploy/systemd/sysusers.conf "$USERS/holdfast.conf"
}

make_environment() {
    say "packages to $PROGRAMS/venv"
    [ -x "$PROGRAMS/venv/bin/python" ] || "$PYTHON" -m venv "$PROGRAMS/venv"
    "$PROGRAMS/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        --requirement "$PROGRAMS/requirements.txt"
}

missing_credentials() {
    for who in owner api worker sweeper; do
        for name in database_url redis_url; do
            if [ "$who/$name" = owner/redis_url ]; then continue; fi
            [ -s "$SETTINGS/credentials/$who/$name" ] || echo "$SETTINGS/credentials/$who/$name"
        done
    done
}

migrate() {
    say "database to this version"
    (cd "$PROGRAMS" && set -a && . "$SETTINGS/holdfast.env" && set +a &&
        DATABASE_URL_FILE="$SETTINGS/credentials/owner/database_url" \
        REDIS_URL_FILE="$SETTINGS/credentials/worker/redis_url" \
        venv/bin/python -m migrations)
}

start() {
    systemctl daemon-reload
    # shellcheck disable=SC2086  # a list of names
    systemctl enable --quiet holdfast.target $SERVICES
    # Old processes end the slice in hand first; the socket stays open, so no request is refused.
    systemctl start holdfast-api.socket holdfast-audit.timer
    # shellcheck disable=SC2086
    systemctl restart holdfast.target $(echo $SERVICES | tr ' ' '\n' | grep '\.service$')
    say "running; see: systemctl status 'holdfast-*'"
}

install_all() {
    lay_programs
    lay_settings
    lay_units
    [ -z "$DESTDIR" ] || return 0
    make_environment
    systemd-sysusers "$USERS/holdfast.conf"
    missing="$(missing_credentials)"
    if [ -n "$missing" ]; then
        say "not started yet: put a URL into each of these files (see deploy/README.md), then run this again"
        echo "$missing"
        return 0
    fi
    migrate
    start
}

uninstall_all() {
    if [ -z "$DESTDIR" ]; then
        # shellcheck disable=SC2086
        systemctl disable --quiet --now holdfast.target $SERVICES || true
        systemctl stop 'holdfast-worker@*' || true
    fi
    rm -rf "$PROGRAMS" "$UNITS"/holdfast* "$USERS/holdfast.conf"
    [ -n "$DESTDIR" ] || systemctl daemon-reload
    say "removed; $SETTINGS, Postgres and Redis are as they were"
}

[ -n "$DESTDIR" ] || [ "$(id -u)" -eq 0 ] || { say "run this as root" >&2; exit 1; }
case "${1:-install}" in
    install) install_all ;;
    uninstall) uninstall_all ;;
    *) say "usage: deploy/install.sh [uninstall]" >&2; exit 2 ;;
esac
