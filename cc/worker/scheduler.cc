#include "cc/worker/scheduler.h"

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"

namespace meshnet::worker {

Scheduler::Scheduler(ShardEngine* engine, Options options)
    : engine_(engine),
      options_(options),
      events_(options.events != nullptr ? options.events : &wake_only_) {}

Scheduler::~Scheduler() { Stop(); }

void Scheduler::Submit(std::shared_ptr<EngineTask> task) {
  const bool decode = task->step().phase == Phase::kDecode;
  {
    absl::MutexLock lock(&mu_);
    if (decode && decode_.empty()) first_decode_ = absl::Now();
    (decode ? decode_ : prefill_).push_back(std::move(task));
  }
  events_->Wake();
}

void Scheduler::Post(std::function<void(ShardEngine&)> command) {
  {
    absl::MutexLock lock(&mu_);
    commands_.push_back(std::move(command));
  }
  events_->Wake();
}

void Scheduler::Drop(uint64_t session_ordinal) {
  // Tasks are destroyed after the lock is gone: their destructors are not ours to judge.
  TaskList dropped;
  absl::MutexLock lock(&mu_);
  last_call_.erase(session_ordinal);
  for (TaskList* list : {&decode_, &prefill_}) {
    for (size_t i = 0; i < list->size();) {
      if ((*list)[i]->session_ordinal() != session_ordinal) {
        ++i;
        continue;
      }
      if (list == &decode_ && i < round_) --round_;
      dropped.push_back(std::move((*list)[i]));
      list->erase(list->begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
}

uint32_t Scheduler::queued() const {
  absl::MutexLock lock(&mu_);
  return static_cast<uint32_t>(decode_.size() + prefill_.size());
}

std::vector<std::shared_ptr<EngineTask>> Scheduler::NextBatch() {
  std::vector<std::shared_ptr<EngineTask>> batch;
  const bool prefill_now = prefill_turn_ && !prefill_.empty();
  if (options_.policy == BatchPolicy::kExact) {
    if (round_ == 0 && !prefill_now) round_ = decode_.size();
    TaskList* list = round_ > 0 ? &decode_ : &prefill_;
    if (list->empty()) return batch;
    if (round_ > 0) --round_;
    prefill_turn_ = list == &decode_ && round_ == 0;
    batch.push_back(std::move(list->front()));
    list->pop_front();
    return batch;
  }
  prefill_turn_ = !decode_.empty() && !prefill_now;
  if (prefill_turn_) {
    batch.assign(std::make_move_iterator(decode_.begin()), std::make_move_iterator(decode_.end()));
    decode_.clear();
    RememberMates(batch);
  } else {
    size_t rows = 0;
    while (!prefill_.empty()) {
      const size_t more = prefill_.front()->step().token_ids.size();
      if (!batch.empty() && rows + more > options_.prefill_token_budget) break;
      rows += more;
      batch.push_back(std::move(prefill_.front()));
      prefill_.pop_front();
    }
  }
  std::stable_sort(batch.begin(), batch.end(), [](const auto& a, const auto& b) {
    return a->session_ordinal() < b->session_ordinal();
  });
  return batch;
}

void Scheduler::RememberMates(const std::vector<std::shared_ptr<EngineTask>>& batch) {
  ++calls_;
  for (const auto& task : batch) last_call_[task->session_ordinal()] = calls_;
}

absl::Time Scheduler::WaitForMates() const {
  if (options_.policy != BatchPolicy::kShared || decode_.empty()) return absl::InfinitePast();
  // Nobody waits while there is something else to do.
  if (prefill_turn_ && !prefill_.empty()) return absl::InfinitePast();
  std::map<uint64_t, size_t> here;
  for (const auto& task : decode_) {
    const auto it = last_call_.find(task->session_ordinal());
    if (it != last_call_.end()) ++here[it->second];
  }
  for (const auto& [ordinal, call] : last_call_) {
    const auto it = here.find(call);
    if (it == here.end()) continue;
    const size_t mates = static_cast<size_t>(
        std::count_if(last_call_.begin(), last_call_.end(),
                      [call = call](const auto& entry) { return entry.second == call; }));
    if (it->second < mates) return first_decode_ + options_.batch_window;
  }
  return absl::InfinitePast();
}

void Scheduler::Execute(const std::vector<std::shared_ptr<EngineTask>>& batch) {
  std::vector<Step> steps;
  steps.reserve(batch.size());
  for (const auto& task : batch) steps.push_back(task->step());
  std::vector<StepOutput> outputs;
  const absl::Status status = engine_->Execute(steps, &outputs);
  outputs.resize(batch.size());
  for (size_t i = 0; i < batch.size(); ++i) {
    if (!status.ok()) {
      outputs[i] = StepOutput();
      outputs[i].status = status;
    }
    batch[i]->Done(std::move(outputs[i]));
  }
}

bool Scheduler::RunOnce() {
  std::deque<std::function<void(ShardEngine&)>> commands;
  std::vector<std::shared_ptr<EngineTask>> batch;
  {
    absl::MutexLock lock(&mu_);
    commands.swap(commands_);
    if (commands.empty()) batch = NextBatch();
  }
  for (auto& command : commands) command(*engine_);
  if (!batch.empty()) Execute(batch);
  return !commands.empty() || !batch.empty();
}

absl::Time Scheduler::IdleUntil() const {
  absl::MutexLock lock(&mu_);
  if (stopping_ || !commands_.empty()) return absl::InfinitePast();
  if (decode_.empty() && prefill_.empty()) return absl::InfiniteFuture();
  const absl::Time mates = WaitForMates();
  return mates > absl::Now() ? mates : absl::InfinitePast();
}

void Scheduler::Loop() {
  while (true) {
    // Also when there is work: what came while the engine was busy may belong to it.
    events_->Poll(IdleUntil());
    if (IdleUntil() > absl::InfinitePast()) continue;
    {
      absl::MutexLock lock(&mu_);
      if (stopping_) return;
    }
    RunOnce();
  }
}

void Scheduler::RunCommands() {
  while (true) {
    std::deque<std::function<void(ShardEngine&)>> commands;
    {
      absl::MutexLock lock(&mu_);
      commands.swap(commands_);
    }
    if (commands.empty()) return;
    for (auto& command : commands) command(*engine_);
  }
}

void Scheduler::Start() {
  thread_ = std::thread([this] { Loop(); });
}

void Scheduler::Stop() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  events_->Wake();
  if (thread_.joinable()) thread_.join();
  TaskList decode;
  TaskList prefill;
  {
    absl::MutexLock lock(&mu_);
    decode.swap(decode_);
    prefill.swap(prefill_);
    round_ = 0;
  }
  RunCommands();
}

}  // namespace meshnet::worker
