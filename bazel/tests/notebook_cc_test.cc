#include <cstdint>
#include <string>

#include "bazel/tests/notebook.pb.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "xxhash.h"

namespace meshnet {
namespace {

TEST(NotebookTest, MessagesOfImportedFilesTravel) {
  bazel::tests::Note note;
  note.set_text("a");
  note.mutable_written()->set_seconds(3);
  EXPECT_EQ(note.SerializeAsString(), std::string("\x0a\x01"
                                                  "a\x12\x02\x08\x03",
                                                  7));
}

TEST(NotebookTest, XxHashGivesItsPublishedValueForNothing) {
  EXPECT_EQ(XXH3_64bits("", 0), uint64_t{0x2d06800538d394c2});
}

}  // namespace
}  // namespace meshnet
