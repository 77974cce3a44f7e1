// Answers the tests of other languages about this implementation of the protocol.
//
//   protocol_oracle descriptors    writes a FileDescriptorSet of the protocol's files
//   protocol_oracle reasons        writes "NAME number grpc_code recovery", one reason a line
//   protocol_oracle frames         reads golden.Question, writes golden.Answer, until the input
//   ends;
//                                  each message after its length in 4 bytes, little-endian
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "cc/common/status.h"
#include "cc/protocol/frame_codec.h"
#include "cc/protocol/golden.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/descriptor.pb.h"
#include "proto/meshnet/shard/v1/boundary.pb.h"
#include "proto/meshnet/shard/v1/errors.pb.h"
#include "proto/meshnet/shard/v1/frame.pb.h"
#include "proto/meshnet/shard/v1/sampling.pb.h"
#include "proto/meshnet/shard/v1/shard.pb.h"
#include "proto/meshnet/shard/v1/tokenizer.pb.h"
#include "tests/golden/golden.pb.h"

namespace meshnet {
namespace {

int WriteDescriptors() {
  google::protobuf::FileDescriptorSet set;
  for (const google::protobuf::FileDescriptor* file :
       {v1::TensorHeader::descriptor()->file(), v1::Error::descriptor()->file(),
        v1::Frame::descriptor()->file(), v1::SamplingParams::descriptor()->file(),
        v1::SeamMessage::descriptor()->file(), v1::Vocabulary::descriptor()->file()}) {
    file->CopyTo(set.add_file());
  }
  const std::string bytes = set.SerializeAsString();
  return std::fwrite(bytes.data(), 1, bytes.size(), stdout) == bytes.size() ? 0 : 1;
}

int WriteReasons() {
  const google::protobuf::EnumDescriptor* table = v1::Reason_descriptor();
  for (int i = 0; i < table->value_count(); ++i) {
    const auto reason = static_cast<v1::Reason>(table->value(i)->number());
    if (reason == v1::REASON_UNSPECIFIED) continue;
    const v1::ReasonOptions& options = OptionsOf(reason);
    std::printf("%s %d %u %d\n", ReasonName(reason).c_str(), static_cast<int>(reason),
                options.grpc_code(), static_cast<int>(options.recovery()));
  }
  return 0;
}

void Refuse(const absl::Status& status, golden::Outcome* outcome) {
  if (!status.ok()) outcome->set_reason(ReasonName(ReasonOf(status)));
}

absl::Status Feed(const std::string& bytes, const FrameExpectation& expectation,
                  FrameAssembler* assembler, golden::Outcome* outcome) {
  v1::Frame frame;
  if (absl::Status status = ParseMessage(bytes, expectation.limits.max_frame_bytes, &frame);
      !status.ok()) {
    return status;
  }
  const auto step = assembler->Add(frame);
  if (!step.ok()) return step.status();
  if (!step->has_value()) return absl::OkStatus();
  *outcome->mutable_step() = ToGolden(**step);
  std::vector<v1::Frame> frames;
  if (absl::Status status = EncodeStep(**step, expectation.schema, expectation.limits, &frames);
      !status.ok()) {
    return status;
  }
  for (const v1::Frame& encoded : frames) outcome->add_encoded(encoded.SerializeAsString());
  return absl::OkStatus();
}

golden::Answer AnswerTo(const golden::Question& question) {
  const FrameExpectation expectation = FromGolden(question.expectation());
  FrameAssembler assembler(expectation);
  golden::Answer answer;
  for (const std::string& bytes : question.frames()) {
    golden::Outcome* outcome = answer.add_outcomes();
    Refuse(Feed(bytes, expectation, &assembler, outcome), outcome);
  }
  if (question.finish()) Refuse(assembler.Finish(), answer.add_outcomes());
  return answer;
}

int AnswerQuestions() {
  unsigned char prefix[4];
  while (std::fread(prefix, 1, sizeof(prefix), stdin) == sizeof(prefix)) {
    const uint32_t size = uint32_t{prefix[0]} | uint32_t{prefix[1]} << 8 |
                          uint32_t{prefix[2]} << 16 | uint32_t{prefix[3]} << 24;
    std::string bytes(size, '\0');
    golden::Question question;
    if (std::fread(&bytes[0], 1, size, stdin) != size || !question.ParseFromString(bytes)) {
      std::fprintf(stderr, "expected a golden.Question of %u bytes\n", size);
      return 1;
    }
    const std::string answer = AnswerTo(question).SerializeAsString();
    for (int shift = 0; shift < 32; shift += 8) {
      std::putchar(static_cast<int>(answer.size() >> shift & 0xff));
    }
    std::fwrite(answer.data(), 1, answer.size(), stdout);
    std::fflush(stdout);
  }
  return 0;
}

int Run(absl::string_view mode) {
  if (mode == "descriptors") return WriteDescriptors();
  if (mode == "reasons") return WriteReasons();
  if (mode == "frames") return AnswerQuestions();
  std::fprintf(stderr, "usage: protocol_oracle descriptors|reasons|frames\n");
  return 2;
}

}  // namespace
}  // namespace meshnet

int main(int argc, char** argv) { return meshnet::Run(argc == 2 ? argv[1] : ""); }
