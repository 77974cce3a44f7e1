// Serves Notebook on a free port of the loopback interface, which it prints, until its standard
// input ends.

#include <cstdio>
#include <iostream>
#include <string>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "bazel/tests/notebook.grpc.pb.h"
#include "grpcpp/grpcpp.h"
#include "grpcpp/health_check_service_interface.h"

ABSL_FLAG(bool, once, false, "end at once instead of waiting for the end of the standard input");

namespace meshnet {
namespace {

class NotebookService final : public bazel::tests::Notebook::Service {
  grpc::Status Take(grpc::ServerContext*, grpc::ServerReader<bazel::tests::Note>* notes,
                    bazel::tests::Summary* summary) override {
    bazel::tests::Note note;
    while (notes->Read(&note)) {
      summary->set_notes(summary->notes() + 1);
      summary->set_last_text(note.text());
    }
    return grpc::Status::OK;
  }
};

int Main() {
  grpc::EnableDefaultHealthCheckService(true);
  NotebookService service;
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&service);
  const auto server = builder.BuildAndStart();
  if (server == nullptr) return 1;
  std::printf("%d\n", port);
  std::fflush(stdout);
  std::string line;
  while (!absl::GetFlag(FLAGS_once) && std::getline(std::cin, line)) {
  }
  server->Shutdown();
  return 0;
}

}  // namespace
}  // namespace meshnet

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return meshnet::Main();
}
