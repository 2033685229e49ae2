#!/bin/bash
set -eu
folder="$1"; root="$folder/root"
mkdir -p "$folder/layer" "$root"
mount -t tmpfs -o size=4G tmpfs "$folder/layer"
mkdir -p "$folder/layer/upper" "$folder/layer/work"
mount -t overlay overlay -o "lowerdir=/,upperdir=$folder/layer/upper,workdir=$folder/layer/work" "$root"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount -t tmpfs -o mode=755 tmpfs "$root/sys/fs/cgroup"
for hierarchy in cpu cpuacct cpuset blkio memory pids devices freezer; do
    mkdir -p "$root/sys/fs/cgroup/$hierarchy"
    mount -t cgroup -o "$hierarchy" "$hierarchy" "$root/sys/fs/cgroup/$hierarchy" || rmdir "$root/sys/fs/cgroup/$hierarchy"
done
mkdir -p "$root/sys/fs/cgroup/systemd" "$root/sys/fs/cgroup/unified"
mount -t cgroup -o none,name=systemd systemd "$root/sys/fs/cgroup/systemd"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup/unified" || true
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for device in null zero full random urandom tty; do touch "$root/dev/$device"; mount --bind "/dev/$device" "$root/dev/$device"; done
mkdir -p "$root/dev/pts" "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts "$root/dev/pts"
ln -sf pts/ptmx "$root/dev/ptmx"; ln -sf /proc/self/fd "$root/dev/fd"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
[ -d "$folder/share" ] && mkdir -p "$root/run/share" && mount --bind "$folder/share" "$root/run/share"
ip link set lo up 2>/dev/null || ifconfig lo up 2>/dev/null || true
hostname holdfast-test
: > "$root/etc/machine-id"
rm -f "$root/usr/sbin/policy-rc.d"  # what containers have, so that no package starts a service
for unit in systemd-sysctl.service systemd-modules-load.service systemd-remount-fs.service systemd-udevd.service systemd-update-utmp.service systemd-journald-audit.socket systemd-udev-trigger.service systemd-binfmt.service; do
    ln -sf /dev/null "$root/etc/systemd/system/$unit"
done
cd "$root"; mkdir -p old; pivot_root . old
umount -l /old; mount --make-rshared /
exec /usr/bin/env -i container=unshare PATH=/usr/sbin:/usr/bin:/sbin:/bin /usr/lib/systemd/systemd --system --unit=basic.target < /dev/null
