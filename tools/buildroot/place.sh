# For tools/bazel and tools/sdk: where things lie. Sets $cache, the cache folder, and $key, the build root's name in it.
# Wants $worktree, $buildroot and a function die.

find_place() {
  : "${HOME:=$(getent passwd "$(id -u)" | cut -d: -f6)}"
  export HOME
  cache=${MESHNET_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/meshnet}
  [[ $cache == /* ]] || cache=$PWD/$cache
  mkdir -p "$cache/buildroot" || die "cannot make the cache folder $cache: set MESHNET_CACHE to a folder that you may write to."
  cache=$(cd "$cache" && pwd -P)
  case $cache/ in
    "$worktree"/*) die "the cache folder $cache is inside the work tree: set MESHNET_CACHE to a folder outside it." ;;
  esac

  key=$({ uname -m && cat "$buildroot/make.sh" "$buildroot/root-packages.txt" "$buildroot/sysroot-packages.txt"; } |
    sha256sum | cut -c1-16)
}

remove() { # DIR...: remove trees whose folders may be read-only
  if [[ $(id -u) == 0 ]]; then rm -rf -- "$@"; else unshare --user --map-root-user rm -rf -- "$@"; fi
}
