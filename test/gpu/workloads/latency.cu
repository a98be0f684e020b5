// Requests of a kernel or some, at given times whether or not the one before is done (open loop), and how long each takes
// from the time it was due until its end is seen. One thread polls: it takes a whole core, but with --block.
//   latency --seconds S [--start-at EPOCH] [--work-us 140] [--kernels 1] [--every-ms 2 | --poisson LOAD_PERCENT --seed N | --think-ms T [--block]]
//           [--ramp-ms 400] [--iters-per-us X] [--samples] [--stdin]
//     --work-us   work of a request in microseconds of the whole GPU; its launch comes on top
//     --kernels   so many kernels one after the other, which share the work
//     --think-ms  instead: a request comes so long after the last one's end
//     --block     then the thread sleeps until the GPU's interrupt
//     --poisson   arrivals at random, so many that they are LOAD_PERCENT of the GPU
//     --samples   each latency too, in the order of arrival
// The other options are those of share. A run's result is one line {"pid","final","count","p50","p90","p99","max",…}, microseconds.
#include <algorithm>
#include <unistd.h>
#include "spin.h"

static const char known[] = "seconds start-at work-us kernels every-ms think-ms poisson seed ramp-ms iters-per-us samples block stdin";

static void run(Gpu& gpu, const Options& o, double rate) {
  const double work_us = o.number("work-us", 140), seconds = o.number("seconds", 5), ramp = o.number("ramp-ms", 400) * 1e-3;
  const double start = o.number("start-at", epoch() + ramp + 0.1), end = start + seconds;
  const unsigned kernels = (unsigned)fmax(1, o.number("kernels", 1)), iterations = (unsigned)fmax(1, work_us * rate / kernels);
  auto request = [&](cudaEvent_t end) {
    for (unsigned i = 0; i < kernels; i++) gpu.run(1, iterations, 0);
    CHECK(cudaEventRecord(end, gpu.stream));
  };
  const double every = o.has("poisson") ? work_us * 1e-6 * 100 / o.number("poisson", 1) : o.number("every-ms", 2) * 1e-3;
  srand48((long)o.number("seed", 1));
  // Due times are known before the start: the same seed gives the same load, whatever becomes of the requests.
  std::vector<double> due;
  for (double t = start - ramp; t < end; t += o.has("poisson") ? -log(1 - drand48()) * every : every) due.push_back(t);

  const size_t outstanding = 1024;
  std::vector<cudaEvent_t> events(outstanding);
  const bool block = o.has("block");
  for (auto& e : events) CHECK(cudaEventCreateWithFlags(&e, cudaEventDisableTiming | (block ? cudaEventBlockingSync : 0)));
  gpu.reset();
  sleep_until(start - ramp);
  const double late = epoch() - (start - ramp);
  std::vector<double> took;
  size_t next = 0, finished = 0;
  if (o.has("think-ms")) {
    const double think = o.number("think-ms", 2) * 1e-3;
    for (due.clear(); epoch() < end;) {
      double begin = epoch();
      request(events[0]);
      if (block) CHECK(cudaEventSynchronize(events[0]));
      else for (cudaError_t e; (e = cudaEventQuery(events[0]));) if (e != cudaErrorNotReady) CHECK(e);
      if (begin >= start) took.push_back((epoch() - begin) * 1e6);
      sleep_until(epoch() + think);
    }
  }
  // What is not done long after the last was due is not waited for: the load is more than the GPU can take.
  while (finished < due.size() && epoch() < end + 3) {
    if (next < due.size() && next - finished < outstanding && epoch() >= due[next]) {
      request(events[next++ % outstanding]);
    }
    while (finished < next) {
      cudaError_t e = cudaEventQuery(events[finished % outstanding]);
      if (e == cudaErrorNotReady) break;
      CHECK(e);
      if (due[finished] >= start) took.push_back((epoch() - due[finished]) * 1e6);
      finished++;
    }
  }
  CHECK(cudaStreamSynchronize(gpu.stream));
  for (auto& e : events) CHECK(cudaEventDestroy(e));
  std::string samples;
  if (o.has("samples"))
    for (double t : took) samples += (samples.empty() ? "" : ",") + std::to_string((long)t);
  std::sort(took.begin(), took.end());
  auto quantile = [&](double q) { return took.empty() ? -1 : took[std::min(took.size() - 1, (size_t)(q * took.size()))]; };
  printf("{\"pid\":%d,\"final\":true,\"count\":%zu,\"unfinished\":%zu,\"late_ms\":%.1f,\"p50\":%.0f,\"p90\":%.0f,\"p99\":%.0f,\"max\":%.0f,\"samples\":[%s]}\n",
         (int)getpid(), took.size(), due.size() - finished, late * 1e3, quantile(0.5), quantile(0.9), quantile(0.99), quantile(1), samples.c_str());
}

int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  Options options;
  options.take({argv + 1, argv + argc}, known);
  Gpu gpu(cudaDeviceScheduleSpin);
  double rate = options.number("iters-per-us", 0);
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
