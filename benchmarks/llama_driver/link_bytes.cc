#include "benchmarks/llama_driver/link_bytes.h"

#include <dirent.h>
#include <linux/tcp.h>  // The C library's own tcp_info ends before the byte counters.
#include <netinet/in.h>
#include <stdlib.h>
#include <sys/socket.h>

#include <memory>

namespace meshnet::benchmarks {

LinkBytes OpenTcpBytes() {
  LinkBytes total;
  const std::unique_ptr<DIR, int (*)(DIR*)> directory(opendir("/proc/self/fd"), closedir);
  if (directory == nullptr) return total;
  while (const dirent* entry = readdir(directory.get())) {
    if (entry->d_name[0] == '.') continue;
    tcp_info info{};
    socklen_t length = sizeof(info);
    if (getsockopt(atoi(entry->d_name), IPPROTO_TCP, TCP_INFO, &info, &length) != 0) continue;
    total.sent += info.tcpi_bytes_sent - info.tcpi_bytes_retrans;
    total.received += info.tcpi_bytes_received;
  }
  return total;
}

}  // namespace meshnet::benchmarks
