// The engine that the command line asks for. Its flags: --engine, --model, --layers, geometry, and
// the fake engine's injections.
#ifndef MESHNET_CC_WORKER_ENGINE_FACTORY_H_
#define MESHNET_CC_WORKER_ENGINE_FACTORY_H_

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "cc/shard_engine/shard_engine.h"
#include "cc/worker/json_log.h"

namespace meshnet::worker {

// "A:B" as [A, B); "" as the whole model {0, 0}. CONFIGURATION_INVALID otherwise.
absl::StatusOr<LayerRange> ParseLayers(absl::string_view text);

// CONFIGURATION_INVALID for flags that contradict each other or lie outside their bounds; looks at
// no file.
absl::Status CheckEngineFlags();

// Loads the shard. May take long. `logger` must outlive the engine.
absl::StatusOr<std::unique_ptr<ShardEngine>> MakeEngineFromFlags(const Logger* logger);

}  // namespace meshnet::worker

#endif  // MESHNET_CC_WORKER_ENGINE_FACTORY_H_
