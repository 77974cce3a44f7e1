#include "cc/worker/relay_transport.h"

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "cc/common/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/meshnet/control/v1/relay.pb.h"

namespace meshnet::worker {
namespace {

namespace relay_v1 = ::meshnet::control::v1;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

constexpr char kEnd[] = {0x2a, 0x00};

std::string End() { return std::string(kEnd, sizeof(kEnd)); }

std::string Frame(const std::string& payload) {
  relay_v1::RelayFrame frame;
  frame.set_payload(payload);
  return frame.SerializeAsString();
}

std::string Opened() {
  relay_v1::RelayFrame frame;
  frame.mutable_opened();
  return frame.SerializeAsString();
}

// The test in the relay's place: one call.
class Carrier : public Stream {
 public:
  void Send(Payload message) override { sent.push_back(*message); }
  bool writable() const override { return is_writable; }
  void HalfClose() override { half_closed = true; }
  void Close(const absl::Status&) override { aborted = true; }
  void Abort() override {
    aborted = true;
    if (on_abort != nullptr) on_abort();
  }

  std::function<void()> on_abort;
  std::vector<std::string> sent;
  bool is_writable = true;
  bool half_closed = false;
  bool aborted = false;
};

struct Called {
  ByteCall call;
  std::shared_ptr<StreamHandler> events;
  std::shared_ptr<Carrier> carrier;
};

class ScriptedCaller : public Caller {
 public:
  absl::Status Call(const ByteCall& call, std::shared_ptr<StreamHandler> handler,
                    std::shared_ptr<Stream>* stream) override {
    absl::MutexLock lock(&mu_);
    if (!failure.ok()) return failure;
    auto carrier = std::make_shared<Carrier>();
    *stream = carrier;
    if (absl::StrContains(call.path, "Listen")) {
      carrier->on_abort = [this, handler] {
        enders_.emplace_back(
            [handler] { handler->OnClosed(MakeError(v1::REASON_CANCELLED, "as asked")); });
      };
    }
    calls_.push_back({call, std::move(handler), carrier});
    return absl::OkStatus();
  }

  // Waits for the call number `index` (from 0).
  Called At(size_t index) {
    absl::MutexLock lock(&mu_);
    const auto is_there = [this, index]()
                              ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return calls_.size() > index; };
    mu_.Await(absl::Condition(&is_there));
    return calls_[index];
  }

  absl::Status failure;

  ~ScriptedCaller() override {
    for (std::thread& ender : enders_) ender.join();
  }

 private:
  std::vector<std::thread> enders_;
  absl::Mutex mu_;
  std::vector<Called> calls_ ABSL_GUARDED_BY(mu_);
};

class Recorder : public StreamHandler {
 public:
  void OnConnected() override { events.push_back("connected"); }
  void OnMessage(absl::string_view bytes) override { events.push_back(absl::StrCat("+", bytes)); }
  void OnHalfClose() override { events.push_back("half-closed"); }
  void OnWritable() override { events.push_back("writable"); }
  void OnClosed(const absl::Status& status) override {
    events.push_back("closed");
    end = status;
  }

  std::vector<std::string> events;
  absl::Status end;
};

class NoDialer : public Dialer {
 public:
  absl::Status Dial(Method, const DialTarget& target, std::shared_ptr<StreamHandler>,
                    std::shared_ptr<Stream>*) override {
    dialed.push_back(target.endpoint);
    return absl::OkStatus();
  }
  std::vector<std::string> dialed;
};

class RelayDialerTest : public ::testing::Test {
 protected:
  RelayDialerTest() : dialer_(&direct_, &caller_, "me") {}

  void Dial() {
    DialTarget target;
    target.endpoint = "relay:7200";
    target.relay_peer_id = "you";
    target.route_token = "token";
    target.attribution = {{"work", "w"}};
    EXPECT_TRUE(dialer_.Dial(Method::kSeam, target, handler_, &stream_).ok());
    called_ = caller_.At(0);
  }

  NoDialer direct_;
  ScriptedCaller caller_;
  RelayDialer dialer_;
  std::shared_ptr<Recorder> handler_ = std::make_shared<Recorder>();
  std::shared_ptr<Stream> stream_;
  Called called_;
};

TEST_F(RelayDialerTest, DirectTargetsGoTheDirectWay) {
  DialTarget target;
  target.endpoint = "worker:7000";
  EXPECT_TRUE(dialer_.Dial(Method::kSeam, target, handler_, &stream_).ok());
  EXPECT_THAT(direct_.dialed, ElementsAre("worker:7000"));
}

TEST_F(RelayDialerTest, ACallCarriesWhatItIsFor) {
  Dial();
  EXPECT_EQ(called_.call.endpoint, "relay:7200");
  EXPECT_EQ(called_.call.path, "/meshnet.control.v1.RelayService/Connect");
  ASSERT_THAT(called_.carrier->sent, SizeIs(1));
  relay_v1::RelayFrame first;
  ASSERT_TRUE(first.ParseFromString(called_.carrier->sent[0]));
  EXPECT_EQ(first.open().caller_id(), "me");
  EXPECT_EQ(first.open().callee_id(), "you");
  EXPECT_EQ(first.open().method(), "Seam");
  EXPECT_EQ(first.open().credential(), "token");
  EXPECT_EQ(first.open().attribution().at("work"), "w");
}

TEST_F(RelayDialerTest, PayloadIsFramedAsProtobufDoes) {
  Dial();
  called_.events->OnMessage(Opened());
  std::vector<std::string> expected = {called_.carrier->sent[0]};
  for (const size_t size : {0, 1, 127, 128, 16383, 16384, 70000}) {
    const std::string payload(size, 'x');
    stream_->Send(std::make_shared<const std::string>(payload));
    expected.push_back(Frame(payload));
    called_.events->OnMessage(Frame(payload));
    EXPECT_EQ(handler_->events.back(), absl::StrCat("+", payload));
  }
  EXPECT_EQ(called_.carrier->sent, expected);
}

TEST_F(RelayDialerTest, AnOrderlyEnd) {
  Dial();
  called_.events->OnMessage(Opened());
  called_.events->OnMessage(Frame("last"));
  called_.events->OnMessage(End());
  // Nothing goes after the answering side's end.
  stream_->Send(std::make_shared<const std::string>("late"));
  EXPECT_EQ(called_.carrier->sent.back(), End());
  called_.events->OnClosed(absl::OkStatus());
  EXPECT_THAT(handler_->events, ElementsAre("connected", "+last", "closed"));
  EXPECT_TRUE(handler_->end.ok()) << handler_->end;
}

TEST_F(RelayDialerTest, HalfCloseIsAnEndFrameAndAnswersStillCome) {
  Dial();
  called_.events->OnMessage(Opened());
  stream_->HalfClose();
  EXPECT_EQ(called_.carrier->sent.back(), End());
  EXPECT_FALSE(called_.carrier->half_closed);
  called_.events->OnMessage(Frame("answer"));
  EXPECT_EQ(handler_->events.back(), "+answer");
}

TEST_F(RelayDialerTest, TheRelaysReasonIsTheEnd) {
  Dial();
  called_.events->OnClosed(MakeError(v1::REASON_PEER_UNREACHABLE, "you does not listen"));
  EXPECT_THAT(handler_->events, ElementsAre("closed"));
  EXPECT_EQ(ReasonOf(handler_->end), v1::REASON_PEER_UNREACHABLE);
  EXPECT_THAT(std::string(handler_->end.message()), HasSubstr("relay:7200: you does not listen"));
}

TEST_F(RelayDialerTest, ACallThatOnlyStopsIsLost) {
  Dial();
  called_.events->OnMessage(Opened());
  called_.events->OnClosed(absl::OkStatus());
  EXPECT_EQ(ReasonOf(handler_->end), v1::REASON_PEER_LOST);
}

TEST_F(RelayDialerTest, WhatNoRelaySendsEndsTheCall) {
  const std::string twice = Frame("a") + Frame("b");
  const std::string longer = std::string("\x22\x05") + "abc";
  const std::vector<std::vector<std::string>> cases = {
      {Frame("before opened")},
      {""},
      {Opened(), Opened()},
      {Opened(), twice},
      {Opened(), longer},
      {Opened(), ""},
      {Opened(), std::string("\x22\xff\xff\xff\xff\xff\xff", 7)},
      {Opened(), End(), Frame("after the end")},
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    ScriptedCaller caller;
    RelayDialer dialer(&direct_, &caller, "me");
    DialTarget target;
    target.endpoint = "relay:7200";
    target.relay_peer_id = "you";
    auto handler = std::make_shared<Recorder>();
    std::shared_ptr<Stream> stream;
    ASSERT_TRUE(dialer.Dial(Method::kSeam, target, handler, &stream).ok());
    const Called called = caller.At(0);
    for (const std::string& frame : cases[i]) called.events->OnMessage(frame);
    EXPECT_TRUE(called.carrier->aborted) << i;
    called.events->OnClosed(MakeError(v1::REASON_CANCELLED, "as asked"));
    EXPECT_EQ(ReasonOf(handler->end), v1::REASON_LIFECYCLE_VIOLATION) << i;
  }
}

TEST_F(RelayDialerTest, BackPressureIsTheCarriers) {
  Dial();
  EXPECT_TRUE(stream_->writable());
  called_.carrier->is_writable = false;
  EXPECT_FALSE(stream_->writable());
  called_.events->OnWritable();
  EXPECT_THAT(handler_->events, ElementsAre("writable"));
}

TEST_F(RelayDialerTest, FailuresToCallAreReturned) {
  caller_.failure = MakeError(v1::REASON_INSECURE_TRANSPORT, "no TLS");
  DialTarget target;
  target.endpoint = "relay:7200";
  target.relay_peer_id = "you";
  EXPECT_EQ(ReasonOf(dialer_.Dial(Method::kSeam, target, handler_, &stream_)),
            v1::REASON_INSECURE_TRANSPORT);
  RelayDialer nameless(&direct_, &caller_, "");
  EXPECT_EQ(ReasonOf(nameless.Dial(Method::kSeam, target, handler_, &stream_)),
            v1::REASON_CONFIGURATION_INVALID);
  EXPECT_THAT(handler_->events, SizeIs(0));
}

class Acceptor : public StreamAcceptor {
 public:
  std::shared_ptr<StreamHandler> Accept(Method method, std::shared_ptr<Stream> accepted,
                                        const PeerInfo& from) override {
    methods.push_back(method);
    stream = std::move(accepted);
    peer = from;
    stream->Send(std::make_shared<const std::string>("hello"));
    handler = std::make_shared<Recorder>();
    return handler;
  }

  std::vector<Method> methods;
  std::shared_ptr<Stream> stream;
  std::shared_ptr<Recorder> handler;
  PeerInfo peer;
};

class RelayListenerTest : public ::testing::Test {
 protected:
  RelayListenerTest() {
    RelayListenerOptions options;
    options.endpoint = "relay:7200";
    options.peer_id = "me";
    options.authenticated = true;
    options.max_calls = 1;
    options.min_backoff = options.max_backoff = absl::Milliseconds(1);
    listener_ = std::make_unique<RelayListener>(options, &caller_, &acceptor_, &logger_);
    listen_ = caller_.At(0);
  }

  void Incoming(const std::string& method) {
    relay_v1::ListenEvent event;
    event.mutable_incoming()->set_call_id("secret");
    event.mutable_incoming()->set_caller_id("you");
    event.mutable_incoming()->set_method(method);
    event.mutable_incoming()->set_credential("token");
    event.mutable_incoming()->set_deadline_ms(60'000);
    (*event.mutable_incoming()->mutable_attribution())["work"] = "w";
    listen_.events->OnMessage(event.SerializeAsString());
  }

  Logger logger_;
  ScriptedCaller caller_;
  Acceptor acceptor_;
  std::unique_ptr<RelayListener> listener_;
  Called listen_;
};

TEST_F(RelayListenerTest, TakesUpACall) {
  EXPECT_EQ(listen_.call.path, "/meshnet.control.v1.RelayService/Listen");
  Incoming("Return");
  EXPECT_THAT(acceptor_.methods, ElementsAre(Method::kReturn));
  EXPECT_EQ(acceptor_.peer.identity, "you");
  EXPECT_EQ(acceptor_.peer.route_token, "token");
  EXPECT_EQ(acceptor_.peer.address, "relay:relay:7200/you");
  const Called call = caller_.At(1);
  EXPECT_EQ(call.call.path, "/meshnet.control.v1.RelayService/Accept");
  EXPECT_TRUE(call.call.reads_wait_for_writes);
  EXPECT_LE(call.call.deadline, absl::Now() + absl::Minutes(1));
  relay_v1::RelayFrame first;
  ASSERT_TRUE(first.ParseFromString(call.carrier->sent[0]));
  EXPECT_EQ(first.accept().call_id(), "secret");
  // What was said before there was a call.
  EXPECT_EQ(call.carrier->sent[1], Frame("hello"));

  call.events->OnMessage(Frame("question"));
  acceptor_.stream->Send(std::make_shared<const std::string>("answer"));
  acceptor_.stream->Close(absl::OkStatus());
  EXPECT_THAT(call.carrier->sent,
              ElementsAre(call.carrier->sent[0], Frame("hello"), Frame("answer"), End()));
  // The caller does not know yet.
  call.events->OnMessage(Frame("late"));
  call.events->OnMessage(End());
  call.events->OnClosed(absl::OkStatus());
  EXPECT_THAT(acceptor_.handler->events, ElementsAre("+question", "closed"));
  EXPECT_TRUE(acceptor_.handler->end.ok());
}

TEST_F(RelayListenerTest, TheCallersEndIsAHalfClose) {
  Incoming("Seam");
  const Called call = caller_.At(1);
  call.events->OnMessage(End());
  acceptor_.stream->Send(std::make_shared<const std::string>("answer"));
  EXPECT_EQ(call.carrier->sent.back(), Frame("answer"));
  call.events->OnClosed(MakeError(v1::REASON_CANCELLED, "gone"));
  EXPECT_THAT(acceptor_.handler->events, ElementsAre("half-closed", "closed"));
  EXPECT_EQ(ReasonOf(acceptor_.handler->end), v1::REASON_CANCELLED);
}

TEST_F(RelayListenerTest, IgnoresWhatItCannotTakeUp) {
  Incoming("Reboot");
  EXPECT_THAT(acceptor_.methods, SizeIs(0));
  Incoming("Seam");
  EXPECT_THAT(acceptor_.methods, SizeIs(1));
  Incoming("Seam");  // one at once
  EXPECT_THAT(acceptor_.methods, SizeIs(1));
  caller_.At(1).events->OnClosed(absl::OkStatus());
}

TEST_F(RelayListenerTest, ComesBackAfterTheRelayWasGone) {
  listen_.events->OnClosed(MakeError(v1::REASON_PEER_LOST, "relay died"));
  caller_.At(1).events->OnClosed(MakeError(v1::REASON_PEER_LOST, "still dead"));
  EXPECT_EQ(caller_.At(2).call.path, "/meshnet.control.v1.RelayService/Listen");
}

TEST_F(RelayListenerTest, LeavesARelayThatMakesNoSense) {
  listen_.events->OnMessage("\x7f garbage");
  // And tries again.
  EXPECT_EQ(caller_.At(1).call.path, "/meshnet.control.v1.RelayService/Listen");
  EXPECT_TRUE(listen_.carrier->aborted);
}

}  // namespace
}  // namespace meshnet::worker
