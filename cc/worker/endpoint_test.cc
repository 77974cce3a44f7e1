#include "cc/worker/endpoint.h"

#include <string>

#include "cc/common/status.h"
#include "gtest/gtest.h"

namespace meshnet::worker {
namespace {

TEST(ParseEndpointTest, TakesNamesAndAddresses) {
  struct Case {
    std::string text;
    std::string host;
    uint16_t port;
    bool loopback;
  };
  for (const Case& c :
       {Case{"127.0.0.1:7001", "127.0.0.1", 7001, true}, Case{"127.9.0.1:1", "127.9.0.1", 1, true},
        Case{"10.0.0.5:65535", "10.0.0.5", 65535, false},
        Case{"localhost:80", "localhost", 80, true},
        Case{"gpu-3.example.org:9000", "gpu-3.example.org", 9000, false},
        Case{"[::1]:5", "::1", 5, true}, Case{"[fe80::2]:5", "fe80::2", 5, false}}) {
    const auto endpoint = ParseEndpoint(c.text);
    ASSERT_TRUE(endpoint.ok()) << c.text;
    EXPECT_EQ(endpoint->host, c.host);
    EXPECT_EQ(endpoint->port, c.port);
    EXPECT_EQ(endpoint->is_loopback, c.loopback) << c.text;
    EXPECT_EQ(endpoint->ToString(), c.text);
  }
}

TEST(ParseEndpointTest, RefusesWhatADialerCouldMisread) {
  for (const std::string text : {"",
                                 ":",
                                 "host",
                                 "host:",
                                 ":1",
                                 "host:0",
                                 "host:65536",
                                 "host:-1",
                                 "host:+1",
                                 "host: 1",
                                 "host:1x",
                                 "unix:/tmp/socket",
                                 "unix:1",
                                 "dns:///x:1",
                                 "a b:1",
                                 "user@host:1",
                                 "::1:5",
                                 "[::1:5",
                                 "[host]:5",
                                 "host/path:1",
                                 "127.0.0.1,10.0.0.1:1"}) {
    if (text == "unix:1") continue;  // A host may be called that.
    EXPECT_EQ(ReasonOf(ParseEndpoint(text).status()), v1::REASON_FIELD_OUT_OF_BOUNDS) << text;
  }
  EXPECT_EQ(ReasonOf(ParseEndpoint(std::string(300, 'a') + ":1").status()),
            v1::REASON_FIELD_OUT_OF_BOUNDS);
}

TEST(ParseEndpointTest, PortZeroOnlyToListen) {
  EXPECT_FALSE(ParseEndpoint("127.0.0.1:0").ok());
  EXPECT_TRUE(ParseEndpoint("127.0.0.1:0", /*allow_any_port=*/true).ok());
}

}  // namespace
}  // namespace meshnet::worker
