// Saturates the GPU and says how much work it gets done. Work is counted in microseconds of the whole GPU.
//   share --seconds S [--start-at EPOCH] [--kernel-us N] [--mode launch|graph|persistent|cooperative] [--window-ms 100]
//         [--ramp-ms 400] [--iters-per-us X] [--managed-mib N] [--processes N] [--stdin] | --calibrate
//     --kernel-us     work of one kernel; graph launches graphs of 20 of them
//     --start-at      when to begin counting, so that several begin at once; the load begins --ramp-ms before
//     --iters-per-us  what --calibrate printed when the GPU was idle; without it every process measures for itself
//     --managed-mib   maps so much managed memory while the load runs
//     --processes     so many processes that each do the same
//     --stdin         one run for each line of standard input, with the options there
// A line {"pid","t","done","total"} for each window: work since the line before, and since the load began. At the end of a run
// {"pid","final",…}: work and seconds counted; lost_us is work that was launched and never done (kernels of one chunk only). launched is all
// work of the run, with what is before and after the time that counts, and event_us how long that took by CUDA's events.
// While it runs it makes no driver call but launches, which need no ioctl: progress is read from mapped memory.
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include "spin.h"

static const char known[] = "seconds start-at kernel-us mode window-ms ramp-ms iters-per-us managed-mib processes stdin calibrate";

static void run(Gpu& gpu, const Options& o, double rate) {
  const std::string mode = o.text("mode", "launch");
  const bool graph = mode == "graph", together = mode == "cooperative" || mode == "persistent";
  if (mode != "launch" && mode != "persistent" && !graph && !together) {
    fprintf(stderr, "--mode %s: want launch, graph, persistent or cooperative\n", mode.c_str());
    exit(2);
  }
  const double kernel_us = o.number("kernel-us", mode == "persistent" ? 1e6 : 1000), seconds = o.number("seconds", 5);
  const double window = o.number("window-ms", 100) * 1e-3, tail = 0.1;

  // Long kernels report every half millisecond or so of work. Short ones are launched and reported in batches of about one.
  const unsigned chunks = kernel_us > 2000 || together ? (unsigned)ceil(kernel_us / 500) : 1;
  const unsigned iterations = (unsigned)fmax(1, kernel_us * rate / chunks);
  const unsigned batch = graph ? 20 : (unsigned)fmax(1, round(1000 / kernel_us));
  const unsigned long long unit = (unsigned long long)chunks * iterations * batch;
  // Enough in the queue that the GPU never waits for this process, and no more than it must drain at the end.
  const unsigned long long depth = (unsigned long long)fmax(2, ceil(4000 * rate / unit)) * unit;
  gpu.reset();
  auto launch = [&] {
    for (unsigned i = 1; i <= batch; i++) gpu.run(chunks, iterations, chunks > 1 ? iterations : i == batch ? unit : 0, together);
  };
  cudaGraph_t captured = nullptr;
  cudaGraphExec_t exec = nullptr;
  if (graph) {
    CHECK(cudaStreamBeginCapture(gpu.stream, cudaStreamCaptureModeThreadLocal));
    launch();
    CHECK(cudaStreamEndCapture(gpu.stream, &captured));
    CHECK(cudaGraphInstantiate(&exec, captured, 0));
    CHECK(cudaGraphUpload(exec, gpu.stream));
    CHECK(cudaStreamSynchronize(gpu.stream));
  }

  cudaEvent_t first, last;
  CHECK(cudaEventCreate(&first));
  CHECK(cudaEventCreate(&last));
  const double ramp = o.number("ramp-ms", 400) * 1e-3, start = o.number("start-at", epoch() + ramp + 0.1), end = start + seconds;
  sleep_until(start - ramp);
  const double late = epoch() - (start - ramp);
  const int pid = getpid(), windows = (int)round(seconds / window);
  double at_start = 0, at_end = 0;
  std::thread log([&] {
    double before = 0;
    for (int i = 0; i <= windows; i++) {
      sleep_until(start + i * window);
      double total = gpu.board->done / rate;
      if (i == 0) before = at_start = total;
      printf("{\"pid\":%d,\"t\":%.6f,\"done\":%.1f,\"total\":%.1f}\n", pid, epoch(), total - before, total);
      before = at_end = total;
    }
  });
  unsigned long long launched = 0;
  size_t managed = (size_t)o.number("managed-mib", 0) * MIB;
  CHECK(cudaEventRecord(first, gpu.stream));
  while (epoch() < end + tail) {
    while (launched - gpu.board->done < depth) {
      if (graph) CHECK(cudaGraphLaunch(exec, gpu.stream));
      else launch();
      launched += unit;
    }
    if (managed && epoch() > start) {
      void* mapped;
      CHECK(cudaMallocManaged(&mapped, managed));
      managed = 0;
    }
    usleep(300);
  }
  log.join();
  gpu.board->stop = 1;
  CHECK(cudaEventRecord(last, gpu.stream));
  CHECK(cudaStreamSynchronize(gpu.stream));
  float event_ms;
  CHECK(cudaEventElapsedTime(&event_ms, first, last));
  CHECK(cudaEventDestroy(first));
  CHECK(cudaEventDestroy(last));
  if (graph) {
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(captured));
  }
  printf("{\"pid\":%d,\"final\":true,\"work_us\":%.1f,\"seconds\":%.3f,\"late_ms\":%.1f,\"lost_us\":%.1f,\"launched\":%.1f,\"event_us\":%.1f}\n", pid,
         at_end - at_start, windows * window, late * 1e3, chunks > 1 ? 0 : (launched - gpu.board->done) / rate, launched / rate, event_ms * 1e3);
}

static int work(const Options& options) {
  Gpu gpu(cudaDeviceScheduleBlockingSync);
  double rate = options.number("iters-per-us", 0);
  if (options.has("calibrate")) {
    printf("{\"iters_per_us\":%.4f,\"blocks\":%d}\n", gpu.calibrate(), gpu.blocks);
    return 0;
  }
  if (!rate) rate = gpu.calibrate();
  printf("{\"pid\":%d,\"ready\":true}\n", (int)getpid());
  if (!options.has("stdin")) {
    run(gpu, options, rate);
    return 0;
  }
  char line[1024];
  while (fgets(line, sizeof line, stdin)) {
    Options o = options;
    o.take_line(line, known);
    run(gpu, o, rate);
  }
  return 0;
}

// Processes of their own: CUDA does not survive fork, so they begin before it does. Each gets a copy of standard input.
static int fork_workers(const Options& options, int n) {
  std::vector<int> pipes;
  for (int i = 0; i < n; i++) {
    int ends[2];
    if (pipe(ends)) { perror("pipe"); return 1; }
    pid_t child = fork();
    if (child < 0) { perror("fork"); return 1; }
    if (child == 0) {
      for (int p : pipes) close(p);
      close(ends[1]);
      dup2(ends[0], 0);
      close(ends[0]);
      exit(work(options));
    }
    close(ends[0]);
    pipes.push_back(ends[1]);
  }
  char line[1024];
  while (options.has("stdin") && fgets(line, sizeof line, stdin))
    for (int p : pipes)
      if (write(p, line, strlen(line)) < 0) perror("write to a worker");
  for (int p : pipes) close(p);
  int failed = 0, status;
  while (wait(&status) > 0) failed |= status != 0;
  return failed;
}

int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  Options options;
  options.take({argv + 1, argv + argc}, known);
  int processes = (int)options.number("processes", 1);
  return processes > 1 ? fork_workers(options, processes) : work(options);
}
