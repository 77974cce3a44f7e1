#include "cc/worker/transport.h"

namespace meshnet::worker {

absl::string_view MethodName(Method method) {
  switch (method) {
    case Method::kSession:
      return "Session";
    case Method::kSeam:
      return "Seam";
    case Method::kReturn:
      return "Return";
  }
  return "";
}

}  // namespace meshnet::worker
