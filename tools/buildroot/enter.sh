#!/usr/bin/env bash
# Runs a command in the build root: enter.sh ROOT WORKTREE CACHE COMMAND [ARGUMENT...]
#
# tools/bazel starts this in a mount namespace of its own (and, for an ordinary user, a user namespace). The command sees
# the build root's system folders, and everything else of the machine (work tree, cache, /tmp, home and data folders) at
# the same paths as outside, so that links, messages and arguments mean the same on both sides.
#
# The new root is entered with pivot_root, not chroot: the kernel denies user namespaces, and with them Bazel's sandbox,
# to processes in a chroot. No process namespace is made: Bazel's server has to outlive this call.
set -euo pipefail

root=$1 worktree=$2 cache=$3
shift 3

bind() { # PATH: show the machine's PATH at the same path in the build root
  [[ -e $1 ]] || return 0
  if [[ -d $1 ]]; then
    [[ -d $root$1 ]] || mkdir -p "$root$1"
  else
    [[ -e $root$1 ]] || { mkdir -p "$(dirname "$root$1")" && : >"$root$1"; }
  fi
  mount --rbind "$1" "$root$1"
}

mount --bind "$root" "$root"

# What belongs to the system comes from the build root; what else the machine has at the top comes along.
for dir in /*; do
  case $dir in
    /bin | /boot | /etc | /lib | /lib32 | /lib64 | /libx32 | /lost+found | /opt | /sbin | /usr | /var) ;;
    /run | /proc.old) ;;
    *) [[ -L $dir || ! -d $dir ]] || bind "$dir" ;;
  esac
done
for dir in /opt/*; do
  [[ $dir == /opt/sysroot || -L $dir ]] || bind "$dir"
done
bind /var/tmp
[[ -e $root$worktree/. && $worktree -ef $root$worktree ]] || bind "$worktree"
[[ -e $root$cache/. && $cache -ef $root$cache ]] || bind "$cache"

# The machine's own certificate authorities and package clients' settings.
for file in /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/java/cacerts /etc/pip.conf /etc/xdg/pip /etc/npmrc \
  /etc/resolv.conf /etc/hosts /etc/passwd /etc/group; do
  bind "$file"
done

mkdir -p "$root/.outside"
cd "$root"
pivot_root . .outside
umount -l /.outside
# Whatever runs in the build root cannot change it: its key stays true.
mount -o remount,bind,ro / 2>/dev/null || true

if [[ -d $MESHNET_CWD ]]; then cd "$MESHNET_CWD"; else cd "$worktree"; fi
unset MESHNET_CWD

# Paths of the machine's own programs and libraries mean nothing here.
unset LD_LIBRARY_PATH LD_PRELOAD PYTHONPATH PYTHONHOME VIRTUAL_ENV JAVA_HOME BAZEL_REAL
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
exec "$@"
