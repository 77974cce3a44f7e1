#include "cc/worker/scheduler.h"

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "cc/common/status.h"
#include "cc/shard_engine/fake/fake_engine.h"
#include "cc/worker/event_source.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace meshnet::worker {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// Writes down what it is asked to execute, as "session:rows" with calls as strings.
class ScriptEngine : public ShardEngine {
 public:
  ScriptEngine() : fake_(*MakeFakeEngine({})) {}

  const Capability& capability() const override { return fake_->capability(); }
  const Tokenizer& tokenizer() const override { return fake_->tokenizer(); }
  MemoryEstimate EstimateMemory() const override { return {}; }
  absl::Status WarmUp() override { return absl::OkStatus(); }
  absl::Status OpenSession(const SessionKey&, const SessionOptions&,
                           std::vector<SessionKey>*) override {
    return absl::OkStatus();
  }
  absl::Status Execute(absl::Span<const Step> batch, std::vector<StepOutput>* outputs) override {
    std::vector<std::string> rows;
    for (const Step& step : batch) {
      rows.push_back(absl::StrCat(step.session.route_session_id, ":", step.token_ids.size()));
    }
    calls.push_back(absl::StrJoin(rows, " "));
    outputs->assign(batch.size(), {});
    return result;
  }
  absl::Status Truncate(const SessionKey&, uint32_t) override { return absl::OkStatus(); }
  absl::Status Release(const SessionKey&) override {
    calls.push_back("release");
    return absl::OkStatus();
  }
  std::vector<SessionKey> EvictIdle() override { return {}; }
  void Cancel(const SessionKey&) override {}
  absl::Status health() const override { return absl::OkStatus(); }
  EngineMetrics metrics() const override { return {}; }

  std::vector<std::string> calls;
  absl::Status result;

 private:
  std::unique_ptr<ShardEngine> fake_;
};

class TestTask : public EngineTask {
 public:
  TestTask(uint64_t ordinal, Phase phase, size_t rows,
           std::function<void(const absl::Status&)> done)
      : ordinal_(ordinal), ids_(rows, 1), done_(std::move(done)) {
    step_.session.route_session_id = std::string(1, static_cast<char>('a' + ordinal));
    step_.phase = phase;
    step_.token_ids = ids_;
  }

  const Step& step() const override { return step_; }
  uint64_t session_ordinal() const override { return ordinal_; }
  void Done(StepOutput output) override { done_(output.status); }

 private:
  const uint64_t ordinal_;
  const std::vector<int32_t> ids_;
  const std::function<void(const absl::Status&)> done_;
  Step step_;
};

class SchedulerTest : public ::testing::Test {
 protected:
  void Use(BatchPolicy policy, uint32_t budget = 8) {
    scheduler_ = std::make_unique<Scheduler>(&engine_, Scheduler::Options{policy, budget});
  }
  void Decode(uint64_t ordinal) { Submit(ordinal, Phase::kDecode, 1); }
  void Prefill(uint64_t ordinal, size_t rows) { Submit(ordinal, Phase::kPrefill, rows); }
  void Submit(uint64_t ordinal, Phase phase, size_t rows) {
    scheduler_->Submit(
        std::make_shared<TestTask>(ordinal, phase, rows, [this](const absl::Status& status) {
          absl::MutexLock lock(&mu_);
          done_.push_back(status);
        }));
  }
  void WaitDone(size_t count) {
    absl::MutexLock lock(&mu_);
    const auto enough = [&] { return done_.size() >= count; };
    mu_.Await(absl::Condition(&enough));
  }

  ScriptEngine engine_;
  absl::Mutex mu_;
  std::vector<absl::Status> done_;
  std::unique_ptr<Scheduler> scheduler_;
};

TEST_F(SchedulerTest, NothingToDoIsNoCall) {
  Use(BatchPolicy::kExact);
  EXPECT_FALSE(scheduler_->RunOnce());
  EXPECT_THAT(engine_.calls, IsEmpty());
}

TEST_F(SchedulerTest, ExactRunsOneStepPerCallDecodeFirst) {
  Use(BatchPolicy::kExact);
  Prefill(0, 4);
  Decode(2);
  Decode(1);
  while (scheduler_->RunOnce()) {
  }
  EXPECT_THAT(engine_.calls, ElementsAre("c:1", "b:1", "a:4"));
}

TEST_F(SchedulerTest, ExactRunsOnePrefillChunkBetweenDecodeRounds) {
  Use(BatchPolicy::kExact);
  Prefill(0, 4);
  Prefill(3, 4);
  Decode(1);
  Decode(2);
  // Both decoding sessions come back at once, as they do when the model is whole.
  for (int i = 0; i < 9; ++i) {
    ASSERT_TRUE(scheduler_->RunOnce());
    if (engine_.calls.back() == "b:1") Decode(1);
    if (engine_.calls.back() == "c:1") Decode(2);
    if (engine_.calls.back() == "a:4") Prefill(0, 4);
  }
  EXPECT_THAT(engine_.calls,
              ElementsAre("b:1", "c:1", "a:4", "b:1", "c:1", "d:4", "b:1", "c:1", "a:4"));
}

TEST_F(SchedulerTest, SharedBatchesAllDecodeThenPrefillUpToTheBudget) {
  Use(BatchPolicy::kShared, 8);
  Prefill(5, 4);
  Prefill(0, 4);
  Prefill(3, 4);
  Decode(4);
  Decode(1);
  while (scheduler_->RunOnce()) {
  }
  EXPECT_THAT(engine_.calls, ElementsAre("b:1 e:1", "a:4 f:4", "d:4"));
}

TEST_F(SchedulerTest, SharedReportsDecodedTokensBeforePrefillBegins) {
  Use(BatchPolicy::kShared, 8);
  Prefill(0, 4);
  Decode(1);
  Decode(2);
  ASSERT_TRUE(scheduler_->RunOnce());
  EXPECT_THAT(engine_.calls, ElementsAre("b:1 c:1"));
  EXPECT_EQ(done_.size(), 2);
  ASSERT_TRUE(scheduler_->RunOnce());
  EXPECT_EQ(done_.size(), 3);
}

TEST_F(SchedulerTest, SharedRunsOnePrefillCallBetweenDecodeCalls) {
  Use(BatchPolicy::kShared, 4);
  Prefill(0, 4);
  Prefill(3, 4);
  Decode(1);
  Decode(2);
  // Both decoding sessions come back at once, as they do when the model is whole.
  for (int i = 0; i < 6; ++i) {
    ASSERT_TRUE(scheduler_->RunOnce());
    if (engine_.calls.back() == "a:4") Prefill(0, 4);
    if (engine_.calls.back() != "b:1 c:1") continue;
    Decode(1);
    Decode(2);
  }
  EXPECT_THAT(engine_.calls, ElementsAre("b:1 c:1", "a:4", "b:1 c:1", "d:4", "b:1 c:1", "a:4"));
}

TEST_F(SchedulerTest, SharedRunsAChunkThatIsLargerThanTheBudget) {
  Use(BatchPolicy::kShared, 2);
  Prefill(0, 4);
  Prefill(1, 4);
  while (scheduler_->RunOnce()) {
  }
  EXPECT_THAT(engine_.calls, ElementsAre("a:4", "b:4"));
}

TEST_F(SchedulerTest, DroppedStepsDoNotRunAndDoNotDisturbTheRound) {
  Use(BatchPolicy::kExact);
  Decode(0);
  Decode(1);
  Decode(2);
  Prefill(3, 4);
  ASSERT_TRUE(scheduler_->RunOnce());
  scheduler_->Drop(1);
  scheduler_->Drop(9);
  EXPECT_EQ(scheduler_->queued(), 2);
  while (scheduler_->RunOnce()) {
  }
  EXPECT_THAT(engine_.calls, ElementsAre("a:1", "c:1", "d:4"));
  EXPECT_EQ(done_.size(), 3);
}

TEST_F(SchedulerTest, CommandsRunBeforeStepsInTheirOrder) {
  Use(BatchPolicy::kExact);
  Decode(0);
  std::vector<int> order;
  scheduler_->Post([&](ShardEngine& engine) {
    order.push_back(1);
    engine.Release({}).IgnoreError();
  });
  scheduler_->Post([&](ShardEngine&) { order.push_back(2); });
  while (scheduler_->RunOnce()) {
  }
  EXPECT_THAT(order, ElementsAre(1, 2));
  EXPECT_THAT(engine_.calls, ElementsAre("release", "a:1"));
}

TEST_F(SchedulerTest, AFailedBatchFailsAllItsSteps) {
  Use(BatchPolicy::kShared);
  engine_.result = MakeError(v1::REASON_ENGINE_FAILURE, "gone");
  Decode(0);
  Decode(1);
  ASSERT_TRUE(scheduler_->RunOnce());
  ASSERT_EQ(done_.size(), 2);
  for (const absl::Status& status : done_) {
    EXPECT_EQ(ReasonOf(status), v1::REASON_ENGINE_FAILURE);
  }
}

TEST_F(SchedulerTest, SessionsThatDecodeTogetherStayTogether) {
  scheduler_ = std::make_unique<Scheduler>(
      &engine_, Scheduler::Options{BatchPolicy::kShared, 8, absl::InfiniteDuration()});
  Decode(0);
  Decode(1);
  ASSERT_TRUE(scheduler_->RunOnce());
  Decode(2);
  ASSERT_TRUE(scheduler_->RunOnce());
  scheduler_->Start();
  // The thread takes up c alone, but a only together with b.
  Decode(2);
  scheduler_->Post([](ShardEngine&) {});
  Decode(0);
  Decode(1);
  WaitDone(6);
  scheduler_->Stop();
  EXPECT_EQ(done_.size(), 6);
  for (const std::string& call : engine_.calls) EXPECT_NE(call, "a:1");
  for (const std::string& call : engine_.calls) EXPECT_NE(call, "b:1");
}

// One event that brings work, handled where the scheduler waits.
class OneEvent final : public EventSource {
 public:
  void Poll(absl::Time deadline) override {
    if (deadline == absl::InfiniteFuture() && !come_) {
      come_ = true;
      return handle();
    }
    wake_only_.Poll(deadline);
  }
  void Wake() override { wake_only_.Wake(); }

  std::function<void()> handle;

 private:
  WakeOnly wake_only_;
  bool come_ = false;
};

TEST_F(SchedulerTest, TheThreadThatComputesHandlesTheEventsThatBringWork) {
  OneEvent events;
  Scheduler::Options options;
  options.events = &events;
  scheduler_ = std::make_unique<Scheduler>(&engine_, options);
  std::thread::id handled_by;
  std::thread::id computed_by;
  absl::Notification ran;
  events.handle = [&] {
    handled_by = std::this_thread::get_id();
    scheduler_->Post([&](ShardEngine&) {
      computed_by = std::this_thread::get_id();
      ran.Notify();
    });
  };
  scheduler_->Start();
  ran.WaitForNotification();
  // Before the events go.
  scheduler_.reset();
  EXPECT_EQ(handled_by, computed_by);
}

TEST_F(SchedulerTest, TheThreadRunsWhatComesAndStopKeepsCommands) {
  Use(BatchPolicy::kExact);
  scheduler_->Start();
  absl::Notification ran;
  scheduler_->Post([&](ShardEngine&) { ran.Notify(); });
  ran.WaitForNotification();
  scheduler_->Stop();
  bool late = false;
  scheduler_->Post([&](ShardEngine&) { late = true; });
  scheduler_->Stop();
  EXPECT_TRUE(late);
}

}  // namespace
}  // namespace meshnet::worker
