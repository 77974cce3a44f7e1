#!/usr/bin/env bash
# Makes the build root in the folder given as the only argument (which must not exist yet).
#
# Called by tools/bazel, which holds the lock, publishes the result and cleans up after a failure. This file and the
# package lists beside it are the build root's key, so everything that shapes its content is here.
#
# The package trees travel as tar streams, so that all files belong to the calling user whatever mode mmdebstrap works
# in, and so that `rm -rf` removes them again.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=$1

# Debian suites. The build root needs Bazel 7 (Debian 13's successor has it); programs are built for Debian 12.
readonly ROOT_SUITE=forky
readonly SYSROOT_SUITE=bookworm
readonly BAZEL_VERSION=7.7.1

say() { echo "build root: $*" >&2; }

packages() { # FILE: the list as mmdebstrap wants it
  grep -v '^#' "$1" | grep -v '^ *$' | paste -sd,
}

# Unpacking as a mapped root lets an ordinary user write into folders that the packages make read-only.
unpack() { # DIR: unpack the tar stream on standard input into DIR
  mkdir -p "$1"
  if [[ $(id -u) == 0 ]]; then
    tar -x --no-same-owner -C "$1" --exclude='./dev/*'
  else
    unshare --user --map-root-user tar -x --no-same-owner -C "$1" --exclude='./dev/*'
  fi
}

mode=unshare
[[ $(id -u) == 0 ]] && mode=root
# A mirror's Release file may be older than its Valid-Until date; the signatures are checked all the same.
common=(--mode="$mode" --format=tar --aptopt='Acquire::Check-Valid-Until "false"'
  --aptopt='APT::Install-Recommends "false"' --aptopt='Acquire::Retries "3"'
  # dpkg need not sync every file: an interrupted build root is thrown away whole.
  --dpkgopt=force-unsafe-io --dpkgopt='path-exclude=/usr/share/locale/*'
  --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-include=/usr/share/doc/*/copyright')

mkdir -p "$out/opt/sysroot"
say "1/2 Debian packages: Bazel (suite $ROOT_SUITE) and the C++ sysroot (suite $SYSROOT_SUITE)"
mmdebstrap "${common[@]}" --variant=extract --include="$(packages "$here/sysroot-packages.txt")" "$SYSROOT_SUITE" - |
  unpack "$out/opt/sysroot" &
sysroot_job=$!
trap 'kill "$sysroot_job" 2>/dev/null || true' EXIT
mmdebstrap "${common[@]}" --variant=minbase --include="$(packages "$here/root-packages.txt")" "$ROOT_SUITE" - |
  unpack "$out"
wait "$sysroot_job"
trap - EXIT

say "2/2 adapting and checking"
# Absolute links of the sysroot would lead out of it, into the build root's own newer libc.
sysroot=$out/opt/sysroot
find "$sysroot" -type l -lname '/*' -print0 | while IFS= read -r -d '' link; do
  target=$(readlink "$link")
  inside=${link#"$sysroot"/}
  up=$(dirname "$inside" | sed -E 's#[^/]+#..#g')
  ln -sfn "${up}${target}" "$link"
done

found=$(dpkg-query --admindir="$out/var/lib/dpkg" -W -f '${Version}' bazel-bootstrap)
if [[ $found != "$BAZEL_VERSION"+* && $found != "$BAZEL_VERSION"-* && $found != "$BAZEL_VERSION" ]]; then
  say "expected Bazel $BAZEL_VERSION from suite $ROOT_SUITE, found bazel-bootstrap $found."
  say "Pin another version in tools/buildroot/make.sh and .bazelversion together."
  exit 1
fi

# Its settings are ours to choose (tools/bazel, .bazelrc), and Bazel complains about one that it does not read.
rm -f "$out/etc/bazel/bazelrc"
