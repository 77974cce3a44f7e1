#include "cc/worker/grpc_events.h"

#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "grpc/support/time.h"
#include "grpcpp/alarm.h"
#include "gtest/gtest.h"

namespace meshnet::worker {
namespace {

using ::testing::ElementsAre;

// An event that comes at once, and what is to be done about it.
class Event final : public GrpcEvents::Tag {
 public:
  explicit Event(std::function<void()> handle) : handle_(std::move(handle)) {}

  void Come(GrpcEvents* events) {
    alarm_.Set(events->queue(), gpr_inf_past(GPR_CLOCK_REALTIME), this);
  }

  void OnDone(bool) override { handle_(); }

 private:
  const std::function<void()> handle_;
  grpc::Alarm alarm_;
};

TEST(GrpcEventsTest, AreHandledWithoutAGuest) {
  GrpcEvents events;
  absl::Notification come;
  Event event([&] { come.Notify(); });
  event.Come(&events);
  come.WaitForNotification();
}

TEST(GrpcEventsTest, AGuestHandlesThemItself) {
  GrpcEvents events;
  std::thread::id handled_by;
  Event event([&] { handled_by = std::this_thread::get_id(); });
  std::thread guest([&] {
    // From here on the host keeps away: the guest has only just left.
    events.Poll(absl::InfinitePast());
    event.Come(&events);
    events.Poll(absl::InfiniteFuture());
    EXPECT_EQ(handled_by, std::this_thread::get_id());
  });
  guest.join();
}

TEST(GrpcEventsTest, AreHandledWhileAGuestIsAwayForLong) {
  GrpcEvents events;
  for (int i = 0; i < 3; ++i) {
    events.Poll(absl::InfinitePast());
    absl::Notification come;
    Event event([&] { come.Notify(); });
    event.Come(&events);
    // What a guest does when it computes: it does not poll.
    come.WaitForNotification();
  }
}

TEST(GrpcEventsTest, SomethingOnItsWayOutIsSeenThroughWhileTheGuestIsAway) {
  GrpcEvents events;
  events.Poll(absl::InfinitePast());
  events.WriteBegins();
  events.Poll(absl::InfinitePast());
  absl::Notification written;
  Event event([&] {
    events.WriteEnds();
    written.Notify();
  });
  event.Come(&events);
  written.WaitForNotification();
}

TEST(GrpcEventsTest, WakeEndsThePollThatWaitsOrTheNextOne) {
  GrpcEvents events;
  events.Wake();
  events.Poll(absl::InfiniteFuture());
  for (int i = 0; i < 100; ++i) {
    std::thread waker([&] { events.Wake(); });
    events.Poll(absl::InfiniteFuture());
    waker.join();
    // One that came after the end is left for the next.
    events.Poll(absl::InfinitePast());
  }
}

TEST(GrpcEventsTest, PollEndsAtItsDeadline) {
  GrpcEvents events;
  const absl::Time deadline = absl::Now() + absl::Milliseconds(5);
  events.Poll(deadline);
  EXPECT_GE(absl::Now(), deadline);
}

TEST(GrpcEventsTest, WhatIsDeferredComesAfterAllThatHasCome) {
  GrpcEvents events;
  std::vector<int> order;
  Event last([&] { order.push_back(3); });
  Event second([&] { order.push_back(2); });
  Event first([&] {
    order.push_back(1);
    events.Defer(&last);
  });
  events.Poll(absl::InfinitePast());
  first.Come(&events);
  second.Come(&events);
  events.Poll(absl::InfiniteFuture());
  EXPECT_THAT(order, ElementsAre(1, 2, 3));
}

TEST(GrpcEventsTest, EventsOfAGuestAndTheHostAreSerial) {
  GrpcEvents events;
  int handled = 0;
  bool busy = false;
  std::vector<std::unique_ptr<Event>> all;
  for (int i = 0; i < 200; ++i) {
    all.push_back(std::make_unique<Event>([&] {
      EXPECT_FALSE(std::exchange(busy, true));
      ++handled;
      busy = false;
    }));
  }
  std::thread sender([&] {
    for (const auto& event : all) event->Come(&events);
  });
  for (int i = 0; i < 50; ++i) {
    events.Poll(absl::Now() + absl::Milliseconds(1));
    // Longer than the host waits for a guest, once.
    if (i == 25) absl::SleepFor(absl::Milliseconds(30));
  }
  sender.join();
  // Taken by whoever polls; the guest comes last.
  absl::Notification end;
  Event last([&] { end.Notify(); });
  last.Come(&events);
  end.WaitForNotification();
  EXPECT_EQ(handled, 200);
}

}  // namespace
}  // namespace meshnet::worker
