// An artifact's manifest, and the comparison of what lies on the disk with it.
//
//   auto manifest = ReadManifest("/srv/models/ID/manifest.json");
//   auto files = VerifyHeaders(*manifest, "/srv/models/ID", threads);
//   auto verified = VerifyLayers(*manifest, *files, {0, 12}, 43, threads);
//
// A set may be on this machine in part: files have their full size, and holes where nothing was
// fetched. What a stage reads is its layers' tensors and every header, and exactly the chunks that
// hold these are hashed and compared at every load; so the identity that a worker claims is true of
// every byte that it computes with, and costs no more than reading them.
#ifndef MESHNET_CC_SHARD_ENGINE_LLAMA_MANIFEST_H_
#define MESHNET_CC_SHARD_ENGINE_LLAMA_MANIFEST_H_

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "cc/shard_engine/shard_engine.h"

namespace meshnet {

struct ManifestFile {
  std::string name;
  uint64_t bytes = 0;
  uint64_t header_bytes = 0;
  // Lower-case hex, one a chunk.
  std::vector<std::string> chunks;
};

struct Manifest {
  // Of the manifest's file: the artifact's identity.
  std::string artifact_sha256;
  std::string tokenizer_sha256;
  uint64_t chunk_bytes = 0;
  std::vector<ManifestFile> files;
};

// ARTIFACT_UNREADABLE, MANIFEST_INVALID.
absl::StatusOr<Manifest> ReadManifest(const std::string& path);

// As ReadManifest; `where` names the text in messages.
absl::StatusOr<Manifest> ParseManifest(absl::string_view json, absl::string_view where);

// Checks that all files are in `folder`, in their sizes and with the manifest's headers. Returns
// their paths. ARTIFACT_UNREADABLE, ARTIFACT_INCOMPLETE, ARTIFACT_MISMATCH.
absl::StatusOr<std::vector<std::string>> VerifyHeaders(const Manifest& manifest,
                                                       const std::string& folder, uint32_t threads);

// Compares the chunks that hold the tensors of a stage with these layers of `model_layers` main
// layers; `paths` are those of VerifyHeaders. Returns the tensors' names: nothing else may be
// computed with. ARTIFACT_UNREADABLE, ARTIFACT_INVALID, ARTIFACT_INCOMPLETE (what the layers need
// was never fetched), ARTIFACT_MISMATCH.
absl::StatusOr<std::set<std::string>> VerifyLayers(const Manifest& manifest,
                                                   const std::vector<std::string>& paths,
                                                   const LayerRange& range, uint32_t model_layers,
                                                   uint32_t threads);

}  // namespace meshnet

#endif  // MESHNET_CC_SHARD_ENGINE_LLAMA_MANIFEST_H_
