#include "cc/protocol/message_scan.h"

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "cc/common/status.h"
#include "cc/common/utf8.h"
#include "google/protobuf/descriptor.h"

namespace meshnet {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;

enum WireType : uint32_t { kVarint = 0, kFixed64 = 1, kDelimited = 2, kFixed32 = 5 };

// Tags and lengths are 32-bit numbers, values 64-bit ones.
constexpr int kMaxShortVarintBytes = 5;
constexpr int kMaxVarintBytes = 10;

WireType WireTypeOf(const FieldDescriptor& field) {
  switch (field.type()) {
    case FieldDescriptor::TYPE_DOUBLE:
    case FieldDescriptor::TYPE_FIXED64:
    case FieldDescriptor::TYPE_SFIXED64:
      return kFixed64;
    case FieldDescriptor::TYPE_FLOAT:
    case FieldDescriptor::TYPE_FIXED32:
    case FieldDescriptor::TYPE_SFIXED32:
      return kFixed32;
    case FieldDescriptor::TYPE_STRING:
    case FieldDescriptor::TYPE_BYTES:
    case FieldDescriptor::TYPE_MESSAGE:
    case FieldDescriptor::TYPE_GROUP:
      return kDelimited;
    default:
      return kVarint;
  }
}

// Whether a parser keeps an element of this repeated field in 4 bytes or fewer.
bool IsNarrow(const FieldDescriptor& field) {
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
    case FieldDescriptor::CPPTYPE_UINT32:
    case FieldDescriptor::CPPTYPE_FLOAT:
    case FieldDescriptor::CPPTYPE_BOOL:
    case FieldDescriptor::CPPTYPE_ENUM:
      return true;
    default:
      return false;
  }
}

class Scanner {
 public:
  absl::Status Scan(absl::string_view rest, const Descriptor& type) {
    while (!rest.empty()) {
      uint64_t tag = 0;
      if (!TakeVarint(&rest, kMaxShortVarintBytes, &tag)) return Malformed(type, "a tag");
      const auto wire_type = static_cast<uint32_t>(tag & 7);
      const uint64_t number = tag >> 3;
      if (number == 0 || number > FieldDescriptor::kMaxNumber) {
        return Malformed(type, absl::StrCat("field number ", number));
      }
      absl::string_view value;
      if (!TakeValue(&rest, wire_type, &value)) {
        return Malformed(type, absl::StrCat("field ", number, " with wire type ", wire_type, ", ",
                                            rest.size(), " bytes before the end"));
      }
      const FieldDescriptor* field = type.FindFieldByNumber(static_cast<int>(number));
      if (field == nullptr) {
        return MakeError(
            v1::REASON_UNKNOWN_FIELD,
            absl::StrCat("expected only fields that schema version 1 defines, got field ", number,
                         " of ", type.full_name(), "; negotiate a version that both ends speak"));
      }
      if (absl::Status status = ScanField(value, wire_type, *field); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

 private:
  static absl::Status Malformed(const Descriptor& type, absl::string_view what) {
    return MakeError(v1::REASON_MALFORMED_MESSAGE,
                     absl::StrCat("expected a serialised ", type.full_name(), ", got ", what));
  }

  // At most `max_bytes`; the last of ten bytes may only carry the 64th bit.
  static bool TakeVarint(absl::string_view* rest, int max_bytes, uint64_t* value) {
    *value = 0;
    for (int i = 0; i < max_bytes && i < static_cast<int>(rest->size()); ++i) {
      const auto byte = static_cast<unsigned char>((*rest)[i]);
      if (i == kMaxVarintBytes - 1 && byte > 1) return false;
      if (i == kMaxShortVarintBytes - 1 && max_bytes == kMaxShortVarintBytes && byte > 0x0f) {
        return false;
      }
      *value |= static_cast<uint64_t>(byte & 0x7f) << (7 * i);
      if (byte < 0x80) {
        rest->remove_prefix(i + 1);
        return true;
      }
    }
    return false;
  }

  static bool TakeBytes(absl::string_view* rest, uint64_t size, absl::string_view* value) {
    if (size > rest->size()) return false;
    *value = rest->substr(0, size);
    rest->remove_prefix(size);
    return true;
  }

  // `value` gets the content of a delimited field; it is of no use for the others.
  static bool TakeValue(absl::string_view* rest, uint32_t wire_type, absl::string_view* value) {
    uint64_t number = 0;
    switch (wire_type) {
      case kVarint:
        return TakeVarint(rest, kMaxVarintBytes, &number);
      case kFixed64:
        return TakeBytes(rest, 8, value);
      case kFixed32:
        return TakeBytes(rest, 4, value);
      case kDelimited:
        return TakeVarint(rest, kMaxShortVarintBytes, &number) && TakeBytes(rest, number, value);
      default:
        return false;
    }
  }

  absl::Status ScanField(absl::string_view value, uint32_t wire_type,
                         const FieldDescriptor& field) {
    const WireType expected = WireTypeOf(field);
    if (wire_type != expected) {
      if (wire_type == kDelimited && field.is_repeated()) return ScanPacked(value, field, expected);
      return MakeError(v1::REASON_UNKNOWN_FIELD,
                       absl::StrCat("expected ", field.full_name(), " with wire type ", expected,
                                    ", got wire type ", wire_type));
    }
    if (field.type() == FieldDescriptor::TYPE_MESSAGE) {
      if (absl::Status status = Count(field); !status.ok()) return status;
      return Scan(value, *field.message_type());
    }
    if (field.type() == FieldDescriptor::TYPE_STRING && !IsValidUtf8(value)) {
      return Malformed(*field.containing_type(),
                       absl::StrCat("a ", field.name(), " that is not UTF-8"));
    }
    return field.is_repeated() && !IsNarrow(field) ? Count(field) : absl::OkStatus();
  }

  absl::Status ScanPacked(absl::string_view value, const FieldDescriptor& field,
                          WireType element_type) {
    absl::string_view element;
    while (!value.empty()) {
      if (!TakeValue(&value, element_type, &element)) {
        return Malformed(*field.containing_type(),
                         absl::StrCat("a packed ", field.name(), " that ends early"));
      }
      if (IsNarrow(field)) continue;
      if (absl::Status status = Count(field); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

  absl::Status Count(const FieldDescriptor& field) {
    if (++elements_ <= kMaxMessageElements) return absl::OkStatus();
    return MakeError(v1::REASON_FIELD_OUT_OF_BOUNDS,
                     absl::StrCat("expected at most ", kMaxMessageElements,
                                  " elements in one message, got more at ", field.full_name()));
  }

  size_t elements_ = 0;
};

}  // namespace

absl::Status ScanMessage(absl::string_view bytes, const google::protobuf::Descriptor& type) {
  return Scanner().Scan(bytes, type);
}

}  // namespace meshnet
