// The shard worker: one artifact, one recipe, one layer range behind one gRPC port.
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/flags/commandlineflag.h"
#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/reflection.h"
#include "absl/flags/usage.h"
#include "absl/flags/usage_config.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "cc/common/status.h"
#include "cc/common/system/memory.h"
#include "cc/common/system/parent.h"
#include "cc/common/system/signal_queue.h"
#include "cc/protocol/frame_codec.h"
#include "cc/worker/endpoint.h"
#include "cc/worker/engine_factory.h"
#include "cc/worker/grpc_events.h"
#include "cc/worker/grpc_log.h"
#include "cc/worker/grpc_transport.h"
#include "cc/worker/identity.h"
#include "cc/worker/json_log.h"
#include "cc/worker/relay_transport.h"
#include "cc/worker/route_token.h"
#include "cc/worker/shard_server.h"
#include "cc/worker/tls_files.h"
#include "cc/worker/worker.h"
#include "google/protobuf/stubs/common.h"

ABSL_FLAG(std::string, listen, "127.0.0.1:0",
          "Address to serve on, host:port; port 0 takes a free one.");
ABSL_FLAG(std::string, port_file, "", "Write the bound port into this file once it is bound.");
ABSL_FLAG(std::string, recipe_fingerprint, "",
          "Refuse to serve when the loaded shard's recipe is another one.");
ABSL_FLAG(
    std::string, mixtures, "",
    "File with signed certification records, one a line: serve routes over two lanes that one "
    "of them certifies. Without it such routes are refused.");
ABSL_FLAG(std::string, mixture_keys, "",
          "PEM file with the public keys of those who may sign the records of --mixtures.");
ABSL_FLAG(std::string, artifact_sha256, "",
          "Refuse to serve when the loaded artifact is another one.");
ABSL_FLAG(
    std::string, identity, "",
    "Refuse to serve unless this file, as `worker --version --json` prints it, describes this "
    "program and lets it serve the loaded shard.");
ABSL_FLAG(uint32_t, prefill_token_budget, 0,
          "Rows of prefill in one engine call (batch policy shared). 0 = one chunk.");
ABSL_FLAG(uint64_t, max_frame_bytes, 1 << 20, "Largest message on a stream, 4 KiB to 64 MiB.");
ABSL_FLAG(uint64_t, max_bundle_bytes, 64 << 20, "Largest boundary of one step, at most 1 GiB.");
ABSL_FLAG(uint32_t, max_inflight_steps, 4, "Steps under way on a seam before a credit returns.");
ABSL_FLAG(absl::Duration, dial_timeout, absl::Milliseconds(1500),
          "Time for the next stage to accept a call.");
ABSL_FLAG(absl::Duration, open_timeout, absl::Seconds(10),
          "Time for the later stages to agree to a route.");
ABSL_FLAG(absl::Duration, keepalive_time, absl::Seconds(1), "Ping a silent peer after this long.");
ABSL_FLAG(absl::Duration, keepalive_timeout, absl::Seconds(5),
          "A peer that does not answer a ping for this long is gone.");
ABSL_FLAG(absl::Duration, drain_timeout, absl::Seconds(30),
          "After SIGTERM or SIGINT running sessions may go on for this long.");
ABSL_FLAG(std::string, tls_cert, "", "PEM file with this worker's certificate chain.");
ABSL_FLAG(std::string, tls_key, "", "PEM file with the certificate's private key.");
ABSL_FLAG(std::string, tls_ca, "",
          "PEM file with the authorities whose certificates callers and stages must present.");
ABSL_FLAG(std::string, tls_target_name, "",
          "Name that the next stages' certificates must carry instead of their host name.");
ABSL_FLAG(std::vector<std::string>, relay, {},
          "Be reachable through the relays at these addresses, host:port, separated by commas.");
ABSL_FLAG(std::string, relay_peer_id, "",
          "This worker's name at relays, for being called and for calling; with TLS a name of its "
          "certificate.");
ABSL_FLAG(std::string, route_token_keys, "",
          "PEM file with the public keys of trackers: serve only who has a route token of one.");
ABSL_FLAG(std::string, worker_id, "",
          "This worker's name at the tracker, which route tokens are issued for.");
ABSL_FLAG(bool, insecure, false, "Allow plaintext beyond loopback. Only in a trusted network.");
ABSL_FLAG(bool, die_with_parent, false, "Shut down when the parent process dies.");
ABSL_FLAG(int32_t, parent_pid, 0,
          "With --die_with_parent: the parent's process id, so that one that is dead already is "
          "noticed. 0 = unknown.");

namespace meshnet::worker {
namespace {

// For peers to be told of what ends when the time for draining is over.
constexpr absl::Duration kFarewell = absl::Milliseconds(500);

constexpr absl::Duration kPoll = absl::Milliseconds(5);

// Where the system does not tell of the parent's end, that is noticed after this long.
constexpr absl::Duration kParentCheck = absl::Seconds(1);

constexpr char kUsage[] = R"(Serves one layer range of one model.

  worker --model=model.gguf --layers=0:15 --listen=127.0.0.1:7001
  worker --model=model.gguf --layers=15:30 --listen=127.0.0.1:7002
  worker --engine=fake --layers=0:8                  # no model: protocol tests
  worker --version --json                            # what this program is
  worker --model=model.gguf --listen=10.0.0.5:7001 \
         --tls_cert=me.pem --tls_key=me.key --tls_ca=fleet.pem
  worker --model=model.gguf --layers=15:30 --relay=relay.example.org:7200 --relay_peer_id=worker-b

Logs are JSON lines on stderr. {"event":"listening","address":"HOST:PORT","port":PORT} comes when the
port is bound (health: NOT_SERVING), {"event":"ready"} when sessions are taken (SERVING).
SIGTERM or SIGINT: no new sessions, running ones have --drain_timeout, then exit 0. A second signal
ends them at once.

Exit codes: 0 shut down as asked; 1 internal; 2 flags; 3 artifact missing or invalid; 4 architecture,
layer range or CPU not supported; 5 identity differs from what the flags expect; 6 not enough memory;
7 the address cannot be bound.)";

enum ExitCode {
  kExitOk = 0,
  kExitInternal = 1,
  kExitFlags = 2,
  kExitArtifact = 3,
  kExitUnsupported = 4,
  kExitIdentity = 5,
  kExitMemory = 6,
  kExitBind = 7,
};

ExitCode ExitCodeOf(const absl::Status& status) {
  switch (ReasonOf(status)) {
    case v1::REASON_UNSPECIFIED:
      return kExitOk;
    case v1::REASON_CONFIGURATION_INVALID:
    case v1::REASON_FIELD_OUT_OF_BOUNDS:
    case v1::REASON_INSECURE_TRANSPORT:
      return kExitFlags;
    case v1::REASON_ARTIFACT_UNREADABLE:
    case v1::REASON_ARTIFACT_INVALID:
    case v1::REASON_MANIFEST_INVALID:
    case v1::REASON_ARTIFACT_INCOMPLETE:
      return kExitArtifact;
    case v1::REASON_ARCHITECTURE_UNSUPPORTED:
    case v1::REASON_LAYER_RANGE_INVALID:
    case v1::REASON_CPU_UNSUPPORTED:
    case v1::REASON_FEATURE_UNSUPPORTED:
      return kExitUnsupported;
    case v1::REASON_RECIPE_MISMATCH:
    case v1::REASON_ARTIFACT_MISMATCH:
      return kExitIdentity;
    case v1::REASON_MEMORY_BUDGET_EXCEEDED:
      return kExitMemory;
    default:
      return kExitInternal;
  }
}

absl::StatusOr<std::string> ReadFile(const std::string& flag, const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream content;
  content << file.rdbuf();
  if (!file.good() || content.str().empty()) {
    return MakeError(v1::REASON_CONFIGURATION_INVALID,
                     absl::StrCat("expected a readable file in --", flag, ", got '", path, "'"));
  }
  return content.str();
}

absl::StatusOr<std::string> ReadPem(const std::string& flag, const std::string& path,
                                    absl::string_view kind) {
  auto pem = ReadFile(flag, path);
  if (pem.ok() && !absl::StrContains(*pem, absl::StrCat(kind, "-----"))) {
    return MakeError(v1::REASON_CONFIGURATION_INVALID,
                     absl::StrCat("expected --", flag, " to name a PEM file with a ", kind,
                                  ", found none in '", path, "'"));
  }
  return pem;
}

// What proves who this worker is, and whom it trusts; leaves it null in plaintext.
absl::Status LoadTls(const Logger* logger, GrpcTransportOptions* options) {
  TlsPaths paths = {absl::GetFlag(FLAGS_tls_cert), absl::GetFlag(FLAGS_tls_key),
                    absl::GetFlag(FLAGS_tls_ca)};
  const int given = !paths.certificate.empty() + !paths.key.empty() + !paths.authorities.empty();
  if (given == 0) return absl::OkStatus();
  if (given != 3) {
    return MakeError(v1::REASON_CONFIGURATION_INVALID,
                     "expected --tls_cert, --tls_key and --tls_ca together: both ends of a "
                     "connection prove who they are");
  }
  auto files = TlsFiles::Load(std::move(paths), logger);
  if (!files.ok()) return files.status();
  options->tls = *std::move(files);
  options->tls_target_name = absl::GetFlag(FLAGS_tls_target_name);
  return absl::OkStatus();
}

absl::StatusOr<ShardServerOptions> ServerOptionsFromFlags(const Logger* logger) {
  ShardServerOptions options;
  options.listen = absl::GetFlag(FLAGS_listen);
  options.transport.keepalive_time = absl::GetFlag(FLAGS_keepalive_time);
  options.transport.keepalive_timeout = absl::GetFlag(FLAGS_keepalive_timeout);
  options.transport.allow_insecure = absl::GetFlag(FLAGS_insecure);
  if (options.transport.keepalive_time < absl::Milliseconds(10) ||
      options.transport.keepalive_timeout < absl::Milliseconds(10)) {
    return MakeError(v1::REASON_CONFIGURATION_INVALID,
                     "expected --keepalive_time and --keepalive_timeout of at least 10ms");
  }
  if (absl::Status status = LoadTls(logger, &options.transport); !status.ok()) return status;
  return options;
}

// One for each relay to listen at.
absl::StatusOr<std::vector<RelayListenerOptions>> RelayOptionsFromFlags(
    const GrpcTransportOptions& transport) {
  const std::string peer_id = absl::GetFlag(FLAGS_relay_peer_id);
  const std::vector<std::string> endpoints = absl::GetFlag(FLAGS_relay);
  if (peer_id.empty() && !endpoints.empty()) {
    return MakeError(v1::REASON_CONFIGURATION_INVALID,
                     "expected --relay_peer_id with --relay: the name that others call");
  }
  if (!peer_id.empty()) {
    if (absl::Status status = ValidatePeerId(peer_id); !status.ok()) {
      return MakeError(v1::REASON_CONFIGURATION_INVALID,
                       absl::StrCat("--relay_peer_id: ", status.message()));
    }
  }
  std::vector<RelayListenerOptions> all;
  for (const std::string& text : endpoints) {
    const auto endpoint = ParseEndpoint(text);
    if (!endpoint.ok()) {
      return MakeError(v1::REASON_CONFIGURATION_INVALID,
                       absl::StrCat("--relay: ", endpoint.status().message()));
    }
    if (transport.tls == nullptr && !endpoint->is_loopback && !transport.allow_insecure) {
      return MakeError(v1::REASON_INSECURE_TRANSPORT,
                       absl::StrCat("expected TLS keys or a relay on loopback, got ", text,
                                    "; or give the insecure flag"));
    }
    RelayListenerOptions options;
    options.endpoint = endpoint->ToString();
    options.peer_id = peer_id;
    options.authenticated = transport.tls != nullptr;
    all.push_back(std::move(options));
  }
  return all;
}

absl::StatusOr<WorkerOptions> WorkerOptionsFromFlags() {
  WorkerOptions options;
  options.version = kVersion;
  options.dial_timeout = absl::GetFlag(FLAGS_dial_timeout);
  options.open_timeout = absl::GetFlag(FLAGS_open_timeout);
  options.prefill_token_budget = absl::GetFlag(FLAGS_prefill_token_budget);
  options.expected_recipe_fingerprint = absl::GetFlag(FLAGS_recipe_fingerprint);
  options.expected_artifact_sha256 = absl::GetFlag(FLAGS_artifact_sha256);
  const std::string mixtures = absl::GetFlag(FLAGS_mixtures);
  const std::string mixture_keys = absl::GetFlag(FLAGS_mixture_keys);
  if (mixtures.empty() != mixture_keys.empty()) {
    return MakeError(v1::REASON_CONFIGURATION_INVALID,
                     "expected --mixtures and --mixture_keys together: a record counts by who "
                     "signed it");
  }
  if (!mixtures.empty()) {
    const auto records = ReadFile("mixtures", mixtures);
    if (!records.ok()) return records.status();
    const auto pem = ReadPem("mixture_keys", mixture_keys, "PUBLIC KEY");
    if (!pem.ok()) return pem.status();
    auto read = Mixtures::FromRecords(*records, *pem);
    if (!read.ok()) return read.status();
    options.mixtures = *std::move(read);
  }
  if (const std::string path = absl::GetFlag(FLAGS_identity); !path.empty()) {
    const auto text = ReadFile("identity", path);
    if (!text.ok()) return text.status();
    auto pins = CheckIdentity(*text);
    if (!pins.ok()) return pins.status();
    options.allowed_artifacts = std::move(pins->artifacts);
    options.allowed_recipes = std::move(pins->recipes);
  }
  Limits limits;
  limits.max_frame_bytes = absl::GetFlag(FLAGS_max_frame_bytes);
  limits.max_bundle_bytes = absl::GetFlag(FLAGS_max_bundle_bytes);
  limits.max_inflight_steps = absl::GetFlag(FLAGS_max_inflight_steps);
  // What a step may hold is the engine's affair.
  limits.max_step_tokens = 1 << 16;
  const auto checked = NegotiateLimits(ToProto(limits), limits);
  if (!checked.ok()) {
    return MakeError(v1::REASON_CONFIGURATION_INVALID,
                     absl::StrCat("limits given by flags: ", checked.status().message()));
  }
  options.limits = *checked;
  return options;
}

// Who decides whom to serve.
absl::StatusOr<std::unique_ptr<Authorizer>> AuthorizerFromFlags() {
  const std::string path = absl::GetFlag(FLAGS_route_token_keys);
  const std::string worker_id = absl::GetFlag(FLAGS_worker_id);
  if (path.empty()) return std::unique_ptr<Authorizer>(std::make_unique<AllowAll>());
  if (worker_id.empty()) {
    return MakeError(v1::REASON_CONFIGURATION_INVALID,
                     "expected --worker_id with --route_token_keys: tokens are issued for it");
  }
  const auto pem = ReadPem("route_token_keys", path, "PUBLIC KEY");
  if (!pem.ok()) return pem.status();
  auto tokens = RouteTokens::Make(*pem, worker_id);
  if (!tokens.ok()) {
    return MakeError(v1::REASON_CONFIGURATION_INVALID,
                     absl::StrCat("--route_token_keys: ", tokens.status().message()));
  }
  return std::unique_ptr<Authorizer>(*std::move(tokens));
}

absl::Status WritePortFile(const std::string& path, int port) {
  // Whoever waits for the file must never read half of it.
  const std::string part = path + ".part";
  std::ofstream file(part);
  file << port << "\n";
  file.close();
  if (!file.good() || std::rename(part.c_str(), path.c_str()) != 0) {
    return MakeError(v1::REASON_CONFIGURATION_INVALID,
                     absl::StrCat("cannot write --port_file '", path, "'"));
  }
  return absl::OkStatus();
}

// The process that --die_with_parent speaks of; 0 = none.
pid_t Parent() {
  if (!absl::GetFlag(FLAGS_die_with_parent)) return 0;
  static const pid_t at_start = getppid();
  const int32_t told = absl::GetFlag(FLAGS_parent_pid);
  return told != 0 ? told : at_start;
}

bool ParentIsGone() { return Parent() != 0 && getppid() != Parent(); }

class Process {
 public:
  Process(SignalQueue* signals, const ShardServerOptions& server_options,
          const WorkerOptions& worker_options, std::vector<RelayListenerOptions> relays,
          std::unique_ptr<Authorizer> authorizer)
      : signals_(signals),
        authorizer_(std::move(authorizer)),
        grpc_(MakeGrpcDialer(&events_, server_options.transport)),
        dialer_(grpc_.get(), grpc_.get(), absl::GetFlag(FLAGS_relay_peer_id)),
        worker_(WithEvents(worker_options, &events_), &dialer_, authorizer_.get(), &logger_),
        server_options_(server_options),
        relays_(std::move(relays)) {}

  ExitCode Run() {
    auto server = ShardServer::Start(server_options_, &events_, &worker_);
    if (!server.ok()) {
      const ExitCode code = ReasonOf(server.status()) == v1::REASON_CONFIGURATION_INVALID
                                ? kExitBind
                                : ExitCodeOf(server.status());
      return Failed("listen_failed", server.status(), code);
    }
    server_ = *std::move(server);
    logger_.Log(Severity::kInfo, "listening",
                {{"address", server_->address()}, {"port", server_->port()}, {"pid", getpid()}});
    if (const std::string path = absl::GetFlag(FLAGS_port_file); !path.empty()) {
      const absl::Status status = WritePortFile(path, server_->port());
      if (!status.ok()) return Failed("port_file_failed", status, kExitFlags);
    }
    for (const RelayListenerOptions& relay : relays_) {
      listeners_.push_back(std::make_unique<RelayListener>(relay, grpc_.get(), &worker_, &logger_));
    }
    loader_ = std::thread([this] { Load(); });
    if (!WaitForLoader()) {
      // Loading cannot be interrupted, and nothing is served yet that could be lost.
      logger_.Log(Severity::kInfo, "exit", {{"code", kExitOk}, {"while", "loading"}});
      _exit(kExitOk);
    }
    loader_.join();
    if (!load_status_.ok()) {
      return Failed("load_failed", load_status_, ExitCodeOf(load_status_));
    }
    (void)WaitForLoader();  // which has no more to say
    Drain();
    logger_.Log(Severity::kInfo, "exit", {{"code", kExitOk}});
    return kExitOk;
  }

 private:
  void Load() {
    const absl::Time begin = absl::Now();
    auto engine = MakeEngineFromFlags(&logger_);
    load_status_ = engine.status();
    if (engine.ok()) load_status_ = worker_.AttachEngine(*std::move(engine));
    if (load_status_.ok()) {
      worker_.Start();
      // What the warm-up's largest step took.
      ReleaseFreeMemory();
      ReleaseProgramPages();
      logger_.Log(Severity::kInfo, "ready",
                  {{"address", server_->address()},
                   {"load_ms", absl::ToInt64Milliseconds(absl::Now() - begin)}});
    }
    signals_->Post();
  }

  // False when this process is told to end before the loader is done.
  bool WaitForLoader() {
    while (true) {
      const std::optional<int> next = signals_->Wait(absl::Now() + kParentCheck);
      if (next == SignalQueue::kPosted) return true;
      if (SaysToEnd(next.value_or(SIGCONT))) return false;
    }
  }

  // SIGCONT does when the parent is gone.
  bool SaysToEnd(int signal) {
    if (signal == SIGCONT && !ParentIsGone()) return false;
    logger_.Log(Severity::kInfo, "signal",
                {{"number", signal}, {"parent_is_gone", ParentIsGone()}});
    return true;
  }

  void Drain() {
    const absl::Time deadline = absl::Now() + absl::GetFlag(FLAGS_drain_timeout);
    worker_.BeginDrain(deadline);
    // What the last sessions were told is to reach their peers: a connection that closes while its
    // peer sends loses what the peer has not read yet.
    while (worker_.is_busy() && absl::Now() < deadline) {
      const std::optional<int> next = signals_->Wait(absl::Now() + kPoll);
      if (next.has_value() && SaysToEnd(*next)) break;
    }
    listeners_.clear();
    worker_.Stop();
    const absl::Time farewell = absl::Now() + kFarewell;
    while (worker_.is_busy() && absl::Now() < farewell) absl::SleepFor(kPoll);
    server_->Shutdown(absl::Seconds(1));
  }

  ExitCode Failed(absl::string_view event, const absl::Status& status, ExitCode code) {
    logger_.Log(Severity::kError, event,
                {{"reason", ReasonName(ReasonOf(status))},
                 {"message", status.message()},
                 {"exit_code", static_cast<int>(code)}});
    worker_.Fail(status);
    return code;
  }

  static WorkerOptions WithEvents(WorkerOptions options, GrpcEvents* events) {
    options.events = events;
    return options;
  }

  SignalQueue* const signals_;
  Logger logger_;
  const std::unique_ptr<Authorizer> authorizer_;
  GrpcEvents events_;
  const std::unique_ptr<GrpcDialer> grpc_;
  RelayDialer dialer_;
  Worker worker_;
  const ShardServerOptions server_options_;
  const std::vector<RelayListenerOptions> relays_;
  std::unique_ptr<ShardServer> server_;
  std::vector<std::unique_ptr<RelayListener>> listeners_;
  std::thread loader_;
  // Written by the loader before it posts.
  absl::Status load_status_;
};

// Protobuf's own words about bytes that cannot be parsed are no JSON, and a peer could have as many
// of them as it likes. What was refused is logged with its reason anyway.
void SilenceProtobuf() {
#if GOOGLE_PROTOBUF_VERSION < 4022000
  google::protobuf::SetLogHandler(nullptr);
#endif
}

bool IsOurs(absl::string_view file) { return absl::StrContains(file, "cc/worker/"); }

bool IsGiven(absl::string_view option, int argc, char** argv) {
  for (int i = 1; i < argc && absl::string_view(argv[i]) != "--"; ++i) {
    if (argv[i] == option) return true;
  }
  return false;
}

// absl's own --help ends with exit code 1, as a mistake does.
bool HelpWanted(int argc, char** argv) {
  return IsGiven("--help", argc, argv) || IsGiven("-help", argc, argv);
}

// absl's own --version knows no --json.
bool IdentityWanted(int argc, char** argv) {
  return IsGiven("--version", argc, argv) && IsGiven("--json", argc, argv);
}

// The usage and the worker's flags, wherever they are defined.
void PrintHelp() {
  std::map<absl::string_view, const absl::CommandLineFlag*> flags;
  for (const auto& [name, flag] : absl::GetAllFlags()) {
    if (IsOurs(flag->Filename())) flags[name] = flag;
  }
  std::cout << kUsage << "\n\nFlags:\n";
  for (const auto& [name, flag] : flags) {
    std::cout << "  --" << name << "  " << flag->Help() << " Default: '" << flag->DefaultValue()
              << "'.\n";
  }
}

int Main() {
  SilenceProtobuf();
  static const Logger logger;
  LogGrpcTo(&logger);
  // gRPC starts threads as soon as it has something to read.
  SignalQueue signals({SIGTERM, SIGINT, SIGCONT});
  std::signal(SIGPIPE, SIG_IGN);
  const auto refuse = [](const absl::Status& status) {
    logger.Log(Severity::kError, "flags_refused",
               {{"reason", ReasonName(ReasonOf(status))}, {"message", status.message()}});
    const ExitCode code = ExitCodeOf(status);
    return code == kExitIdentity ? code : kExitFlags;
  };
  if (absl::Status status = CheckEngineFlags(); !status.ok()) return refuse(status);
  const auto server_options = ServerOptionsFromFlags(&logger);
  if (!server_options.ok()) return refuse(server_options.status());
  const auto worker_options = WorkerOptionsFromFlags();
  if (!worker_options.ok()) return refuse(worker_options.status());
  const auto relays = RelayOptionsFromFlags(server_options->transport);
  if (!relays.ok()) return refuse(relays.status());
  auto authorizer = AuthorizerFromFlags();
  if (!authorizer.ok()) return refuse(authorizer.status());
  if (Parent() != 0) {
    // Unlike SIGTERM it also reaches a process that is stopped, and lets it go on to its end.
    SignalAtParentEnd(SIGCONT);
    if (ParentIsGone()) {
      logger.Log(Severity::kInfo, "exit", {{"code", kExitOk}, {"while", "parent is gone"}});
      return kExitOk;
    }
  }
  return Process(&signals, *server_options, *worker_options, *relays, *std::move(authorizer)).Run();
}

}  // namespace
}  // namespace meshnet::worker

int main(int argc, char** argv) {
  // Boundaries of prefill chunks are megabytes that live for milliseconds: in heaps that keep them
  // they would be resident memory that nobody uses.
  meshnet::KeepHeapsSmall();
  absl::SetProgramUsageMessage(meshnet::worker::kUsage);
  absl::FlagsUsageConfig config;
  config.version_string = [] { return absl::StrCat("worker ", meshnet::worker::kVersion, "\n"); };
  config.contains_helpshort_flags = meshnet::worker::IsOurs;
  absl::SetFlagsUsageConfig(config);
  if (meshnet::worker::IdentityWanted(argc, argv)) {
    std::fputs(meshnet::worker::IdentityJson().c_str(), stdout);
    return meshnet::worker::kExitOk;
  }
  if (meshnet::worker::HelpWanted(argc, argv)) {
    meshnet::worker::PrintHelp();
    return meshnet::worker::kExitOk;
  }
  const std::vector<char*> rest = absl::ParseCommandLine(argc, argv);
  if (rest.size() > 1) {
    std::fprintf(stderr, "expected flags only, got '%s'; see --help\n", rest[1]);
    return meshnet::worker::kExitFlags;
  }
  return meshnet::worker::Main();
}
