// What this program is: version, protocol, engine, lane, toolchain.
//
// A release holds the same as a file beside the program (`worker --version --json` prints it).
// Started with --identity=FILE the worker serves only if the file describes this very program, and
// only what the file lets it serve, so that a mixed-up installation says so before it answers.
#ifndef MESHNET_CC_WORKER_IDENTITY_H_
#define MESHNET_CC_WORKER_IDENTITY_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace meshnet::worker {

// Of the release, as in //release:version.bzl.
extern const char kVersion[];

// One JSON object, keys in order, ending in a newline. The same for the same program on every
// machine. `certification` lists records that the build knows of: none.
std::string IdentityJson();

// What an identity file lets a worker serve beside what it says of the program. Empty = anything.
struct IdentityPins {
  std::vector<std::string> artifacts;  // SHA-256, of `pins.artifacts`
  std::vector<std::string> recipes;    // fingerprints, of `pins.recipes`
};

// CONFIGURATION_INVALID for what is no identity file, RECIPE_MISMATCH naming the first field that
// is not this program's.
absl::StatusOr<IdentityPins> CheckIdentity(absl::string_view json);

}  // namespace meshnet::worker

#endif  // MESHNET_CC_WORKER_IDENTITY_H_
