// A delay-and-bandwidth proxy on the command line; see proxy.h and --help.
#include <stdio.h>
#include <stdlib.h>

#include <iostream>
#include <string>
#include <thread>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "benchmarks/proxy/proxy.h"

ABSL_FLAG(std::vector<std::string>, target, {},
          "Where to connect to, one HOST:PORT (numeric IPv4) for each link, separated by commas");
ABSL_FLAG(std::vector<std::string>, listen, {},
          "Port of 127.0.0.1 to listen at for each link, in the order of --target; default: any");
ABSL_FLAG(double, rtt_ms, 0, "Round trip in milliseconds; each direction gets half");
ABSL_FLAG(double, mbit, 0, "Bandwidth of each link and direction in Mbit/s; 0 = unlimited");

namespace meshnet::benchmarks {
namespace {

constexpr char kUsage[] =
    "Delays and narrows TCP connections.\n\n"
    "Example: proxy --target=127.0.0.1:50051,127.0.0.1:50052 --rtt_ms=40 --mbit=100\n\n"
    "Prints {\"ports\": [...]} when it listens. Then reads commands from stdin, one a line, and "
    "answers each with one\n"
    "line of JSON: `stats`, `reset` (counters to zero), `shape RTT_MS MBIT`. Ends, with a last "
    "line of statistics, when\n"
    "stdin ends. Exit status: 0, or 2 when it cannot start.";

LinkShape ShapeOf(double rtt_ms, double mbit) {
  LinkShape shape;
  shape.one_way_delay = std::chrono::nanoseconds(static_cast<long long>(rtt_ms * 1e6 / 2));
  shape.bits_per_second = mbit * 1e6;
  return shape;
}

std::string StatsJson(const std::vector<LinkStats>& all) {
  std::string out = "{\"links\": [";
  for (size_t i = 0; i < all.size(); ++i) {
    const LinkStats& stats = all[i];
    absl::StrAppend(&out, i == 0 ? "" : ", ", "{\"connections\": ", stats.connections,
                    ", \"open_connections\": ", stats.open_connections,
                    ", \"bytes_up\": ", stats.bytes_up, ", \"bytes_down\": ", stats.bytes_down,
                    ", \"peak_queued_bytes\": ", stats.peak_queued_bytes, "}");
  }
  return out + "]}";
}

int Main() {
  Proxy proxy;
  const std::vector<std::string> targets = absl::GetFlag(FLAGS_target);
  const std::vector<std::string> listens = absl::GetFlag(FLAGS_listen);
  if (targets.empty() || (!listens.empty() && listens.size() != targets.size())) {
    std::cerr << "proxy: expected --target=HOST:PORT[,...] and as many --listen ports or none; see "
                 "--help\n";
    return 2;
  }
  std::string ports;
  for (size_t i = 0; i < targets.size(); ++i) {
    const std::vector<std::string> parts = absl::StrSplit(targets[i], ':');
    Endpoint endpoint;
    int listen_port = 0;
    if (parts.size() != 2 || !absl::SimpleAtoi(parts[1], &endpoint.port) ||
        (!listens.empty() && !absl::SimpleAtoi(listens[i], &listen_port))) {
      std::cerr << "proxy: expected HOST:PORT, got \"" << targets[i] << "\"; see --help\n";
      return 2;
    }
    endpoint.host = parts[0];
    const absl::StatusOr<int> port = proxy.AddLink(endpoint, listen_port);
    if (!port.ok()) {
      std::cerr << "proxy: " << port.status() << "\n";
      return 2;
    }
    absl::StrAppend(&ports, i == 0 ? "" : ", ", *port);
  }
  proxy.SetShape(ShapeOf(absl::GetFlag(FLAGS_rtt_ms), absl::GetFlag(FLAGS_mbit)));

  absl::Status served;
  std::thread loop([&] { served = proxy.Run(); });
  std::cout << "{\"ports\": [" << ports << "]}" << std::endl;
  std::string line;
  while (std::getline(std::cin, line)) {
    const std::vector<std::string> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
    double rtt_ms = 0;
    double mbit = 0;
    if (words.size() == 1 && words[0] == "stats") {
      std::cout << StatsJson(proxy.Stats()) << std::endl;
    } else if (words.size() == 1 && words[0] == "reset") {
      proxy.ResetStats();
      std::cout << "{}" << std::endl;
    } else if (words.size() == 3 && words[0] == "shape" && absl::SimpleAtod(words[1], &rtt_ms) &&
               absl::SimpleAtod(words[2], &mbit) && rtt_ms >= 0 && mbit >= 0) {
      proxy.SetShape(ShapeOf(rtt_ms, mbit));
      std::cout << "{}" << std::endl;
    } else {
      std::cout << "{\"error\": \"expected stats, reset or shape RTT_MS MBIT\"}" << std::endl;
    }
  }
  proxy.Stop();
  loop.join();
  std::cout << StatsJson(proxy.Stats()) << std::endl;
  if (!served.ok()) {
    std::cerr << "proxy: " << served << "\n";
    return 2;
  }
  return 0;
}

}  // namespace
}  // namespace meshnet::benchmarks

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage(meshnet::benchmarks::kUsage);
  absl::ParseCommandLine(argc, argv);
  return meshnet::benchmarks::Main();
}
