// The harness: see commands.h. Arguments are name=value:
//   configs=FILE    the package's configs (golden_cases.py writes it)
//   cases=FILE      named calls (likewise)
//   sources=FOLDER  what kernels include: gemm/gemm.cuh, gemm/split_k.cuh, gemm/partial_sums.cuh,
//                   quantize/quantize.cuh, copy_rows/copy_rows.cuh and sum_rows/sum_rows.cuh, of
//                   any content
//   seed=N calls=N threads=N cache=FOLDER
// Commands: random, configs, tensor_maps, faults, opening, fork, threads, record, handlers.

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <map>
#include <string>

#include "calls.h"
#include "commands.h"

namespace harness {
namespace {

struct Arguments {
  std::map<std::string, std::string> values = {{"seed", "1"}, {"calls", "1000"}, {"threads", "8"}};

  long Number(const std::string& name) const { return std::stol(values.at(name)); }
};

// What XLA asks of a handler when it is registered.
void PrintHandlers() {
  for (const Op* op : kOps) {
    const HandlerFacts facts = Describe(op->execute);
    std::printf("%s %s %s\n", op->name, facts.version.c_str(),
                facts.is_command_buffer_compatible ? "command-buffer" : "no-command-buffer");
  }
}

int Run(const std::string& command, Arguments& arguments) {
  const uint64_t seed = arguments.Number("seed");
  const long calls = arguments.Number("calls");
  const auto lists = [&] { return ReadConfigLists(arguments.values.at("configs")); };
  const auto cases = [&] { return ReadCases(arguments.values.at("cases")); };
  const std::string cache = arguments.values["cache"];
  UseSources(arguments.values["sources"]);
  ReportCrashes(command + " seed=" + arguments.values["seed"]);
  if (command == "random") {
    RunRandomCalls(seed, calls, lists(), cache);
  } else if (command == "configs") {
    RunRandomConfigs(seed, calls, lists());
  } else if (command == "tensor_maps") {
    RunTensorMaps(seed, calls);
  } else if (command == "faults") {
    RunFaults(cases());
  } else if (command == "opening") {
    RunOpening(cases(), calls);
  } else if (command == "fork") {
    RunFork(cases()[0]);
  } else if (command == "threads") {
    RunThreads(seed, arguments.Number("threads"), calls, lists(), cache);
  } else if (command == "record") {
    RecordLaunches(cases());
  } else if (command == "handlers") {
    PrintHandlers();
  } else {
    std::fprintf(stderr, "no such command: %s\n", command.c_str());
    return 2;
  }
  if (NumErrors() == 0) return 0;
  std::fprintf(stderr, "%ld errors were not destroyed\n", NumErrors());
  return 1;
}

}  // namespace
}  // namespace harness

int main(int argc, char** argv) {
  harness::Arguments arguments;
  for (int i = 2; i < argc; ++i) {
    const std::string argument = argv[i];
    const size_t equals = argument.find('=');
    arguments.values[argument.substr(0, equals)] = argument.substr(equals + 1);
  }
  try {
    return harness::Run(argc > 1 ? argv[1] : "", arguments);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", argc > 1 ? argv[1] : "harness", error.what());
    return 2;
  }
}
