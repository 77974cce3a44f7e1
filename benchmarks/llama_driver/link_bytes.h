// Payload bytes of this process's TCP connections, as the kernel counts them.
#ifndef BENCHMARKS_LLAMA_DRIVER_LINK_BYTES_H_
#define BENCHMARKS_LLAMA_DRIVER_LINK_BYTES_H_

#include <cstdint>

namespace meshnet::benchmarks {

struct LinkBytes {
  // Without retransmissions and headers.
  uint64_t sent = 0;
  uint64_t received = 0;
};

// Sums over the TCP sockets that this process has open now. Closed ones no longer count, so
// differences mean something only while no connection comes or goes.
LinkBytes OpenTcpBytes();

}  // namespace meshnet::benchmarks

#endif  // BENCHMARKS_LLAMA_DRIVER_LINK_BYTES_H_
