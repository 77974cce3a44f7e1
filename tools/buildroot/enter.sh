#!/usr/bin/env bash
# Runs a command in the build root: enter.sh ROOT WORKTREE CACHE COMMAND [ARGUMENT...]
#
# tools/bazel starts this in a mount namespace of its own (and, for an ordinary user, a user namespace). The command sees
# the build root's system folders, and everything else of the machine (work tree, cache, /tmp, home and data folders) at
# the same paths as outside, so that links, messages and arguments mean the same on both sides.
#
# The new root is moved over the old one before chroot enters it: the kernel denies user namespaces, and with them
# Bazel's sandbox, to processes whose root is not that of their mount namespace. No process namespace is made: Bazel's
# server has to outlive this call.
set -euo pipefail

# Outside and inside alike, and with the programs of root that an ordinary user's own may lack.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

root=$1 worktree=$2 cache=$3
shift 3

# mount -n everywhere: the root of a user namespace may not write mount's own table.
bind() { # PATH: show the machine's folder PATH at the same path in the build root
  [[ -d $root$1 ]] || mkdir -p "$root$1"
  mount -n --rbind "$1" "$root$1"
}

bind_settings() { # PATH: the same for a file or folder of settings, which may be missing
  [[ -e $1 ]] || return 0
  if [[ -d $1 ]]; then
    [[ -d $root$1 ]] || mkdir -p "$root$1"
  else
    [[ -e $root$1 ]] || { mkdir -p "$(dirname "$root$1")" && : >"$root$1"; }
  fi
  # Within a build root, a file that was replaced outside since cannot be bound again.
  mount -n --rbind "$1" "$root$1" 2>/dev/null || true
}

mount -n --bind "$root" "$root"

# What belongs to the system comes from the build root; what else the machine has at the top comes along.
for dir in /*; do
  case $dir in
    /bin | /boot | /etc | /lib | /lib32 | /lib64 | /libx32 | /lost+found | /opt | /run | /sbin | /usr | /var) ;;
    *) [[ -L $dir || ! -d $dir ]] || bind "$dir" ;;
  esac
done
for dir in /opt/*; do
  [[ $dir == /opt/sysroot || $dir == /opt/sdk || -L $dir || ! -d $dir ]] || bind "$dir"
done
# SDKs (tools/sdk) at one path on every machine, also those that are installed while Bazel's server runs.
[[ -d $root/opt/sdk ]] || mkdir -p "$root/opt/sdk"
mount -n --rbind "$cache/sdk/$MESHNET_BUILD_ROOT_KEY" "$root/opt/sdk"
bind /var/tmp
[[ -e $root$worktree/. && $worktree -ef $root$worktree ]] || bind "$worktree"
[[ -e $root$cache/. && $cache -ef $root$cache ]] || bind "$cache"

# The machine's own certificate authorities and package clients' settings.
for file in /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/java/cacerts /etc/pip.conf /etc/xdg/pip /etc/npmrc \
  /etc/resolv.conf /etc/hosts /etc/passwd /etc/group; do
  bind_settings "$file"
done

# Whatever runs in the build root cannot change it: its key stays true.
mount -n -o remount,bind,ro "$root" 2>/dev/null || true
cd "$root"
mount -n --move . /

# Paths of the machine's own programs and libraries mean nothing here.
unset LD_LIBRARY_PATH LD_PRELOAD PYTHONPATH PYTHONHOME VIRTUAL_ENV JAVA_HOME BAZEL_REAL
# The one locale that every Debian has.
export LC_ALL=C.UTF-8
exec chroot . /usr/bin/bash -c '
  cd "$MESHNET_CWD" 2>/dev/null || cd "$0"
  unset MESHNET_CWD
  exec "$@"
' "$worktree" "$@"
