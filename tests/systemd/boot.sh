#!/bin/bash
# boot.sh FOLDER: boots systemd as PID 1 of namespaces of its own over an overlay of this machine's files.
set -eu
folder="$1"; name="holdfast-test-$$"
cgroups=()
for hierarchy in cpu cpuacct blkio pids devices freezer systemd unified; do
    [ -d "/sys/fs/cgroup/$hierarchy" ] && cgroups+=("/sys/fs/cgroup/$hierarchy/$name")
done
own="$(sed -n 's/^[0-9]*:memory://p' /proc/self/cgroup)"
[ -d "/sys/fs/cgroup/memory$own" ] && cgroups+=("/sys/fs/cgroup/memory$own/$name")
for group in "${cgroups[@]}"; do mkdir -p "$group"; echo $$ > "$group/cgroup.procs"; done
printf '%s\n' "${cgroups[@]}" > "$folder/cgroups"
exec unshare --mount --pid --fork --cgroup --uts --ipc --net --kill-child --propagation private /bin/bash "$(dirname "$0")/inside.sh" "$folder"
