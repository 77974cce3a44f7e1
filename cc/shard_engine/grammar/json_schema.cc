#include "cc/shard_engine/grammar/json_schema.h"

#include <algorithm>
#include <cstddef>
#include <exception>
#include <initializer_list>
#include <set>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "cc/common/status.h"
#include "json-schema-to-grammar.h"
#include "json.h"

namespace meshnet {
namespace {

constexpr size_t kMaxDepth = 64;  // of brackets in the text
constexpr size_t kMaxSchemas = 512;
constexpr size_t kMaxProperties = 128;     // of one object
constexpr size_t kMaxNameBytes = 128;      // of a property or definition
constexpr int64_t kMaxRepetitions = 2000;  // llama.cpp takes more than this as no bound

// What a document's validity depends on. Other keywords are annotations, or nobody's.
const std::set<std::string>& ValidationKeywords() {
  static const auto* const keywords = new std::set<std::string>{
      "$ref",
      "additionalItems",
      "additionalProperties",
      "allOf",
      "anyOf",
      "const",
      "contains",
      "dependencies",
      "dependentRequired",
      "dependentSchemas",
      "else",
      "enum",
      "exclusiveMaximum",
      "exclusiveMinimum",
      "if",
      "items",
      "maxContains",
      "maxItems",
      "maxLength",
      "maxProperties",
      "maximum",
      "minContains",
      "minItems",
      "minLength",
      "minProperties",
      "minimum",
      "multipleOf",
      "not",
      "oneOf",
      "pattern",
      "patternProperties",
      "prefixItems",
      "properties",
      "propertyNames",
      "required",
      "then",
      "type",
      "unevaluatedItems",
      "unevaluatedProperties",
      "uniqueItems",
      "$dynamicRef",
      "$recursiveRef",
  };
  return *keywords;
}

absl::Status Bad(absl::string_view path, absl::string_view what) {
  return MakeError(v1::REASON_GRAMMAR_INVALID,
                   absl::StrCat("json_schema at ", path.substr(0, 200), ": ", what.substr(0, 500)));
}

// Brackets within brackets, before anything recurses over them. What is no JSON is found later.
bool IsTooDeep(absl::string_view text) {
  size_t depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      if (c == '"') in_string = false;
    } else if (c == '"') {
      in_string = true;
    } else if (c == '{' || c == '[') {
      if (++depth > kMaxDepth) return true;
    } else if ((c == '}' || c == ']') && depth > 0) {
      --depth;
    }
  }
  return false;
}

class Checker {
 public:
  explicit Checker(const common_json& root) : root_(root) {}

  absl::Status Check() {
    for (const char* const key : {"$defs", "definitions"}) {
      if (!root_.is_object() || !root_.contains(key)) continue;
      const common_json& definitions = root_.at(key);
      const std::string path = absl::StrCat("#/", key);
      if (!definitions.is_object()) return Bad(path, "expected an object of schemas");
      for (const auto& [name, schema] : definitions.items()) {
        absl::Status status = CheckName(name, path);
        if (status.ok()) status = CheckSchema(schema, absl::StrCat(path, "/", name));
        if (!status.ok()) return status;
      }
    }
    return CheckSchema(root_, "#");
  }

 private:
  static absl::Status CheckName(const std::string& name, const std::string& path) {
    if (name.size() <= kMaxNameBytes) return absl::OkStatus();
    return Bad(path, absl::StrCat("expected names of at most ", kMaxNameBytes,
                                  " bytes, got one of ", name.size()));
  }

  // Every keyword that matters must be one of `known`.
  static absl::Status Only(const common_json& schema, const std::string& path,
                           std::initializer_list<absl::string_view> known) {
    for (const auto& [key, value] : schema.items()) {
      const bool matters = ValidationKeywords().count(key) > 0;
      if (!matters || std::find(known.begin(), known.end(), key) != known.end()) continue;
      return Bad(path, absl::StrCat("`", key,
                                    "` is not supported here; leave it out or write a "
                                    "grammar"));
    }
    return absl::OkStatus();
  }

  // A schema of one type that is named, or none.
  absl::Status CheckTyped(const common_json& schema, const std::string& type,
                          const std::string& path) {
    const auto has = [&schema](const char* key) { return schema.contains(key); };
    if (has("const")) return Only(schema, path, {"type", "const"});
    if (has("enum")) return Only(schema, path, {"type", "enum"});
    // Without a type llama.cpp goes by the keywords.
    const bool object_keywords = has("properties") || has("additionalProperties");
    const bool array_keywords = has("items") || has("prefixItems");
    const bool string_keywords = has("minLength") || has("maxLength") || has("format");
    const bool untyped = type.empty();
    if (type == "object" || (untyped && object_keywords)) return CheckObject(schema, path);
    if (type == "array" || (untyped && array_keywords)) return CheckArray(schema, path);
    if (type == "string" || (untyped && string_keywords)) {
      absl::Status status = Only(schema, path, {"type", "minLength", "maxLength"});
      if (status.ok()) status = CheckBounds(schema, "minLength", "maxLength", path);
      return status;
    }
    if (type == "integer") {
      if ((has("minimum") && has("exclusiveMinimum")) ||
          (has("maximum") && has("exclusiveMaximum"))) {
        return Bad(path, "expected one lower and one upper bound, got two of a kind");
      }
      return CheckIntegerBounds(schema, path);
    }
    return Only(schema, path, {"type"});
  }

  absl::Status CheckIntegerBounds(const common_json& schema, const std::string& path) {
    // Twice within what an int64 holds, because llama.cpp negates bounds and adds to them.
    constexpr double kLimit = 1e15;
    for (const char* const key : {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}) {
      if (!schema.contains(key)) continue;
      const common_json& bound = schema.at(key);
      const double value = bound.is_number() ? bound.get<double>() : 2 * kLimit;
      if (!(value >= -kLimit && value <= kLimit)) {
        return Bad(path, absl::StrCat("expected a number in [-1e15, 1e15] as `", key, "`"));
      }
    }
    return Only(schema, path,
                {"type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"});
  }

  absl::Status CheckBounds(const common_json& schema, const char* low, const char* high,
                           const std::string& path) {
    int64_t least = 0;
    for (const char* const key : {low, high}) {
      if (!schema.contains(key)) continue;
      const common_json& bound = schema.at(key);
      const int64_t value = bound.is_number_integer() ? bound.get<int64_t>() : -1;
      if (value < least || value > kMaxRepetitions) {
        return Bad(path, absl::StrCat("expected an integer in [", least, ", ", kMaxRepetitions,
                                      "] as `", key, "`"));
      }
      least = value;
    }
    return absl::OkStatus();
  }

  absl::Status CheckObject(const common_json& schema, const std::string& path) {
    absl::Status status =
        Only(schema, path, {"type", "properties", "required", "additionalProperties"});
    if (!status.ok()) return status;
    const bool has_properties = schema.contains("properties");
    if (has_properties) {
      const common_json& properties = schema.at("properties");
      if (!properties.is_object()) return Bad(path, "expected an object as `properties`");
      if (properties.size() > kMaxProperties) {
        return Bad(path, absl::StrCat("expected at most ", kMaxProperties, " properties, got ",
                                      properties.size()));
      }
      for (const auto& [name, property] : properties.items()) {
        status = CheckName(name, path);
        if (status.ok()) status = CheckSchema(property, absl::StrCat(path, "/properties/", name));
        if (!status.ok()) return status;
      }
    }
    if (schema.contains("required")) {
      const common_json& required = schema.at("required");
      if (!required.is_array()) return Bad(path, "expected a list of names as `required`");
      for (const common_json& name : required) {
        if (!name.is_string() || !has_properties ||
            !schema.at("properties").contains(name.get<std::string>())) {
          return Bad(path, "expected names of `properties` in `required`");
        }
      }
    }
    if (schema.contains("additionalProperties") &&
        !schema.at("additionalProperties").is_boolean()) {
      return CheckSchema(schema.at("additionalProperties"),
                         absl::StrCat(path, "/additionalProperties"));
    }
    return absl::OkStatus();
  }

  absl::Status CheckArray(const common_json& schema, const std::string& path) {
    if (schema.contains("items") && schema.contains("prefixItems")) {
      return Bad(path, "`items` beside `prefixItems` is not supported");
    }
    const char* const key = schema.contains("prefixItems") ? "prefixItems" : "items";
    if (schema.contains(key) && schema.at(key).is_array()) {
      absl::Status status = Only(schema, path, {"type", key});
      size_t i = 0;
      for (const common_json& item : schema.at(key)) {
        status.Update(CheckSchema(item, absl::StrCat(path, "/", key, "/", i++)));
        if (!status.ok()) return status;
      }
      return status;
    }
    absl::Status status = Only(schema, path, {"type", "items", "minItems", "maxItems"});
    if (status.ok()) status = CheckBounds(schema, "minItems", "maxItems", path);
    if (status.ok() && schema.contains("items")) {
      status = CheckSchema(schema.at("items"), absl::StrCat(path, "/items"));
    }
    return status;
  }

  absl::Status CheckReference(const common_json& schema, const std::string& path) {
    if (!schema.at("$ref").is_string()) return Bad(path, "expected a text as `$ref`");
    const auto ref = schema.at("$ref").get<std::string>();
    for (const char* const key : {"$defs", "definitions"}) {
      const std::string prefix = absl::StrCat("#/", key, "/");
      if (!absl::StartsWith(ref, prefix)) continue;
      const std::string name = ref.substr(prefix.size());
      if (name.find_first_of("/~%") == std::string::npos && root_.contains(key) &&
          root_.at(key).is_object() && root_.at(key).contains(name)) {
        return Only(schema, path, {"$ref"});
      }
    }
    return Bad(path, "expected #/$defs/NAME or #/definitions/NAME of the same schema as `$ref`");
  }

  absl::Status CheckSchema(const common_json& schema, const std::string& path) {
    // Counts a schema as often as it is converted.
    if (++schemas_ > kMaxSchemas) {
      return Bad(path, absl::StrCat("expected at most ", kMaxSchemas, " schemas within it"));
    }
    if (!schema.is_object()) return Bad(path, "expected an object as a schema");
    if (schema.contains("$ref")) return CheckReference(schema, path);
    for (const char* const key : {"oneOf", "anyOf"}) {
      if (!schema.contains(key)) continue;
      absl::Status status = Only(schema, path, {key});
      if (status.ok() && (!schema.at(key).is_array() || schema.at(key).empty())) {
        status = Bad(path, absl::StrCat("expected a list of schemas as `", key, "`"));
      }
      if (!status.ok()) return status;
      size_t i = 0;
      for (const common_json& alternative : schema.at(key)) {
        status = CheckSchema(alternative, absl::StrCat(path, "/", key, "/", i++));
        if (!status.ok()) return status;
      }
      return absl::OkStatus();
    }
    if (!schema.contains("type")) return CheckTyped(schema, "", path);
    const common_json& type = schema.at("type");
    if (type.is_string()) return CheckTyped(schema, type.get<std::string>(), path);
    if (!type.is_array() || type.empty()) {
      return Bad(path, "expected a text or a list of texts as `type`");
    }
    for (const common_json& one : type) {
      if (!one.is_string()) return Bad(path, "expected a text or a list of texts as `type`");
      // Keywords of another type say nothing about a value of this one, but would be refused by
      // CheckTyped: a schema of several types has none, unless just one of them is not null.
      const auto name = one.get<std::string>();
      if (name == "null" && type.size() == 2) continue;
      if (++schemas_ > kMaxSchemas) {
        return Bad(path, absl::StrCat("expected at most ", kMaxSchemas, " schemas within it"));
      }
      absl::Status status = CheckTyped(schema, name, path);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  const common_json& root_;
  size_t schemas_ = 0;
};

}  // namespace

absl::StatusOr<std::string> GrammarOfJsonSchema(absl::string_view schema) {
  if (IsTooDeep(schema)) {
    return Bad("#", absl::StrCat("expected at most ", kMaxDepth, " levels of brackets"));
  }
  try {
    const common_json root = common_json::parse(std::string(schema));
    if (absl::Status status = Checker(root).Check(); !status.ok()) return status;
    return json_schema_to_grammar(root, /*force_gbnf=*/true);
  } catch (const std::exception& error) {
    return Bad("#", error.what());
  }
}

}  // namespace meshnet
