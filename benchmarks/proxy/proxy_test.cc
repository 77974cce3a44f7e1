#include "benchmarks/proxy/proxy.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <thread>
#include <vector>

namespace meshnet::benchmarks {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

sockaddr_in Loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

// Bytes that differ at every place, so that a loss or a swap shows.
std::string Pattern(size_t size, uint32_t seed) {
  std::string out(size, '\0');
  uint32_t state = seed;
  for (char& byte : out) {
    state = state * 1664525u + 1013904223u;
    byte = static_cast<char>(state >> 24);
  }
  return out;
}

void SendAll(int fd, const std::string& data) {
  size_t done = 0;
  while (done < data.size()) {
    const ssize_t sent = send(fd, data.data() + done, data.size() - done, MSG_NOSIGNAL);
    ASSERT_GT(sent, 0);
    done += static_cast<size_t>(sent);
  }
}

// Until `size` bytes or the end of the stream.
std::string Receive(int fd, size_t size) {
  std::string out;
  std::vector<char> buffer(1 << 16);
  while (out.size() < size) {
    const ssize_t got = recv(fd, buffer.data(), std::min(buffer.size(), size - out.size()), 0);
    if (got <= 0) break;
    out.append(buffer.data(), static_cast<size_t>(got));
  }
  return out;
}

constexpr size_t kEverything = static_cast<size_t>(-1);

class ProxyTest : public testing::Test {
 protected:
  void Start(LinkShape shape, Proxy::Options options = Proxy::Options()) {
    listener_ = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address = Loopback(0);
    socklen_t length = sizeof(address);
    ASSERT_EQ(bind(listener_, reinterpret_cast<sockaddr*>(&address), length), 0);
    ASSERT_EQ(listen(listener_, 64), 0);
    ASSERT_EQ(getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &length), 0);
    proxy_ = std::make_unique<Proxy>(options);
    const absl::StatusOr<int> port = proxy_->AddLink({"127.0.0.1", ntohs(address.sin_port)});
    ASSERT_TRUE(port.ok()) << port.status();
    port_ = *port;
    proxy_->SetShape(shape);
    loop_ = std::thread([this] { EXPECT_TRUE(proxy_->Run().ok()); });
  }

  void TearDown() override {
    proxy_->Stop();
    loop_.join();
    close(listener_);
  }

  int Connect() {
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    const sockaddr_in address = Loopback(port_);
    EXPECT_EQ(connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    return fd;
  }
  int Accept() { return accept(listener_, nullptr, nullptr); }

  int listener_ = -1;
  int port_ = 0;
  std::unique_ptr<Proxy> proxy_;
  std::thread loop_;
};

TEST_F(ProxyTest, BytesComeOutWholeAndInOrderBothWays) {
  Start(LinkShape{milliseconds(1), 400e6});
  const int client = Connect();
  const int server = Accept();
  const std::string up = Pattern(3000000, 1);
  const std::string down = Pattern(2500001, 2);
  std::thread sender([&] {
    SendAll(client, up);
    shutdown(client, SHUT_WR);
  });
  std::thread other([&] {
    SendAll(server, down);
    shutdown(server, SHUT_WR);
  });
  std::string got_up;
  std::thread reader([&] { got_up = Receive(server, kEverything); });
  const std::string got_down = Receive(client, kEverything);
  sender.join();
  other.join();
  reader.join();
  EXPECT_TRUE(got_up == up);
  EXPECT_TRUE(got_down == down);
  const std::vector<LinkStats> stats = proxy_->Stats();
  ASSERT_EQ(stats.size(), 1u);
  EXPECT_EQ(stats[0].connections, 1u);
  EXPECT_EQ(stats[0].bytes_up, up.size());
  EXPECT_EQ(stats[0].bytes_down, down.size());
  close(client);
  close(server);
}

TEST_F(ProxyTest, ARoundTripTakesAtLeastTwiceTheDelay) {
  Start(LinkShape{milliseconds(15), 0});
  const int client = Connect();
  const int server = Accept();
  for (int i = 0; i < 3; ++i) {
    const Clock::time_point start = Clock::now();
    SendAll(client, "ping");
    ASSERT_EQ(Receive(server, 4), "ping");
    EXPECT_GE(Clock::now() - start, milliseconds(15));
    SendAll(server, "pong");
    ASSERT_EQ(Receive(client, 4), "pong");
    EXPECT_GE(Clock::now() - start, milliseconds(30));
  }
  close(client);
  close(server);
}

TEST_F(ProxyTest, BandwidthIsABoundSharedByAllConnections) {
  Start(LinkShape{milliseconds(0), 80e6});
  const int clients[2] = {Connect(), Connect()};
  const int servers[2] = {Accept(), Accept()};
  const std::string data = Pattern(500000, 3);
  const Clock::time_point start = Clock::now();
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&, i] { SendAll(clients[i], data); });
    threads.emplace_back([&, i] { EXPECT_TRUE(Receive(servers[i], data.size()) == data); });
  }
  for (std::thread& thread : threads) thread.join();
  // 1,000,000 bytes at 10,000,000 bytes a second.
  EXPECT_GE(Clock::now() - start, milliseconds(100));
  for (int i = 0; i < 2; ++i) {
    close(clients[i]);
    close(servers[i]);
  }
}

TEST_F(ProxyTest, AHalfCloseIsCarriedAndTheOtherDirectionStaysOpen) {
  Start(LinkShape{milliseconds(2), 100e6});
  const int client = Connect();
  const int server = Accept();
  SendAll(client, "question");
  shutdown(client, SHUT_WR);
  EXPECT_EQ(Receive(server, kEverything), "question");
  SendAll(server, "answer");
  EXPECT_EQ(Receive(client, 6), "answer");
  SendAll(server, "more");
  close(server);
  EXPECT_EQ(Receive(client, kEverything), "more");
  close(client);
}

TEST_F(ProxyTest, MemoryIsBoundedWhenTheReceiverDoesNotRead) {
  Proxy::Options options;
  options.max_queued_bytes = 128 * 1024;
  Start(LinkShape{milliseconds(1), 0}, options);
  const int client = Connect();
  const int server = Accept();
  const std::string data = Pattern(20000000, 4);
  std::thread sender([&] {
    SendAll(client, data);
    shutdown(client, SHUT_WR);
  });
  // Read only once the proxy's bound and all socket buffers are full: the proxy then delivers
  // nothing more.
  uint64_t delivered = 0;
  for (int quiet = 0; quiet < 20;) {
    const uint64_t now = proxy_->Stats()[0].bytes_up;
    quiet = now == delivered && now > 0 ? quiet + 1 : 0;
    delivered = now;
    std::this_thread::yield();
  }
  EXPECT_TRUE(Receive(server, kEverything) == data);
  sender.join();
  // One read of 64 KiB may start just below the bound.
  EXPECT_LE(proxy_->Stats()[0].peak_queued_bytes, 128u * 1024 + 64 * 1024);
  EXPECT_GT(proxy_->Stats()[0].peak_queued_bytes, 0u);
  close(client);
  close(server);
}

TEST_F(ProxyTest, ManyConnectionsKeepTheirBytesApart) {
  Start(LinkShape{milliseconds(3), 0});
  constexpr int kConnections = 32;
  std::vector<std::thread> servers;
  std::vector<int> clients;
  for (int i = 0; i < kConnections; ++i) {
    clients.push_back(Connect());
    servers.emplace_back([fd = Accept()] {
      SendAll(fd, Receive(fd, kEverything));
      close(fd);
    });
  }
  for (int i = 0; i < kConnections; ++i) {
    SendAll(clients[i], Pattern(10000, 100 + i));
    shutdown(clients[i], SHUT_WR);
  }
  for (int i = 0; i < kConnections; ++i) {
    EXPECT_TRUE(Receive(clients[i], kEverything) == Pattern(10000, 100 + i)) << i;
    close(clients[i]);
  }
  for (std::thread& server : servers) server.join();
  EXPECT_EQ(proxy_->Stats()[0].connections, 32u);
  EXPECT_EQ(proxy_->Stats()[0].bytes_up, 320000u);
  EXPECT_EQ(proxy_->Stats()[0].bytes_down, 320000u);
}

TEST_F(ProxyTest, ADeadTargetEndsTheConnection) {
  Start(LinkShape{});
  const int client = Connect();
  const int server = Accept();
  // Closing with a linger time of zero sends a reset, as a killed process's kernel does.
  const linger reset = {1, 0};
  setsockopt(server, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
  close(server);
  EXPECT_EQ(Receive(client, kEverything), "");
  close(client);
}

TEST_F(ProxyTest, StatisticsStartAgainAfterAReset) {
  Start(LinkShape{});
  const int client = Connect();
  const int server = Accept();
  SendAll(client, "12345");
  ASSERT_EQ(Receive(server, 5), "12345");
  SendAll(server, "6");
  ASSERT_EQ(Receive(client, 1), "6");
  proxy_->ResetStats();
  EXPECT_EQ(proxy_->Stats()[0].bytes_up, 0u);
  EXPECT_EQ(proxy_->Stats()[0].open_connections, 1u);
  SendAll(client, "78");
  ASSERT_EQ(Receive(server, 2), "78");
  EXPECT_EQ(proxy_->Stats()[0].bytes_up, 2u);
  close(client);
  close(server);
}

TEST(ProxyAddLinkTest, RefusesANameAsTarget) {
  Proxy proxy;
  const absl::StatusOr<int> port = proxy.AddLink({"localhost", 1});
  EXPECT_EQ(port.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(port.status().message(),
            "expected a numeric IPv4 address as target, got \"localhost\"");
}

}  // namespace
}  // namespace meshnet::benchmarks
