// A JSON schema as a grammar in llama.cpp's notation.
//
// llama.cpp converts; this checks before. A schema that comes from a stranger costs a bounded
// amount of time and memory, and one whose conversion would let documents through that the schema
// forbids is refused instead: llama.cpp ignores such keywords.
#ifndef MESHNET_CC_SHARD_ENGINE_GRAMMAR_JSON_SCHEMA_H_
#define MESHNET_CC_SHARD_ENGINE_GRAMMAR_JSON_SCHEMA_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace meshnet {

// GRAMMAR_INVALID with the path of what is wrong or not supported. Supported are: type (also a list
// of types), enum, const, properties, required, additionalProperties, items, prefixItems, minItems,
// maxItems, minLength, maxLength, the formats date, time, date-time and uuid, bounds of integers,
// anyOf, oneOf (as anyOf) and references to #/$defs/NAME and #/definitions/NAME. Objects are
// written with their required properties first, in the order of the schema.
absl::StatusOr<std::string> GrammarOfJsonSchema(absl::string_view schema);

}  // namespace meshnet

#endif  // MESHNET_CC_SHARD_ENGINE_GRAMMAR_JSON_SCHEMA_H_
