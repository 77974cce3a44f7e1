#include "benchmarks/llama_driver/link_bytes.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>

namespace meshnet::benchmarks {
namespace {

TEST(LinkBytesTest, CountsPayloadOfOpenConnectionsBothWays) {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  ASSERT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), length), 0);
  ASSERT_EQ(listen(listener, 1), 0);
  ASSERT_EQ(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length), 0);
  const int client = socket(AF_INET, SOCK_STREAM, 0);
  ASSERT_EQ(connect(client, reinterpret_cast<sockaddr*>(&address), length), 0);
  const int server = accept(listener, nullptr, nullptr);

  const LinkBytes before = OpenTcpBytes();
  std::string data(1000, 'x');
  ASSERT_EQ(send(client, data.data(), 1000, 0), 1000);
  ASSERT_EQ(recv(server, data.data(), 1000, MSG_WAITALL), 1000);
  ASSERT_EQ(send(server, data.data(), 7, 0), 7);
  ASSERT_EQ(recv(client, data.data(), 7, MSG_WAITALL), 7);
  const LinkBytes after = OpenTcpBytes();
  // Both ends belong to this process.
  EXPECT_EQ(after.sent - before.sent, 1007u);
  EXPECT_EQ(after.received - before.received, 1007u);
  close(client);
  close(server);
  close(listener);
}

}  // namespace
}  // namespace meshnet::benchmarks
