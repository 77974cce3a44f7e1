#include "cc/worker/endpoint.h"

#include <arpa/inet.h>

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "cc/common/status.h"

namespace meshnet::worker {
namespace {

constexpr size_t kMaxHostBytes = 253;

absl::Status Refuse(absl::string_view text) {
  return MakeError(v1::REASON_FIELD_OUT_OF_BOUNDS,
                   absl::StrCat("expected an endpoint as host:port or [ipv6]:port, got '",
                                text.substr(0, kMaxHostBytes), "'"));
}

bool IsNameByte(char c) { return absl::ascii_isalnum(c) || c == '.' || c == '-' || c == '_'; }

}  // namespace

std::string Endpoint::ToString() const {
  if (host.find(':') != std::string::npos) return absl::StrCat("[", host, "]:", port);
  return absl::StrCat(host, ":", port);
}

absl::StatusOr<Endpoint> ParseEndpoint(absl::string_view text, bool allow_any_port) {
  const size_t colon = text.rfind(':');
  if (colon == absl::string_view::npos || colon == 0) return Refuse(text);
  absl::string_view host = text.substr(0, colon);
  const absl::string_view port_text = text.substr(colon + 1);
  uint32_t port = 0;
  if (port_text.empty() || !absl::ascii_isdigit(port_text[0]) ||
      !absl::SimpleAtoi(port_text, &port) || port > 65535 || (port == 0 && !allow_any_port)) {
    return Refuse(text);
  }
  Endpoint endpoint;
  endpoint.port = static_cast<uint16_t>(port);
  if (host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
    in6_addr address;
    if (inet_pton(AF_INET6, std::string(host).c_str(), &address) != 1) return Refuse(text);
    endpoint.is_loopback = IN6_IS_ADDR_LOOPBACK(&address);
  } else {
    if (host.size() > kMaxHostBytes || !std::all_of(host.begin(), host.end(), IsNameByte)) {
      return Refuse(text);
    }
    in_addr address;
    if (inet_pton(AF_INET, std::string(host).c_str(), &address) == 1) {
      endpoint.is_loopback = (ntohl(address.s_addr) >> 24) == 127;
    } else {
      endpoint.is_loopback = host == "localhost";
    }
  }
  endpoint.host = std::string(host);
  return endpoint;
}

}  // namespace meshnet::worker
