// OpenCL: a kernel whose result is checked, memory.
//   opencl                    the kernel alone
//   opencl fill MIB MAX_MIB   and buffers in pieces of MIB (then of half, down to 1 MiB) until one is refused; the kernel then runs again
// Exit status 3: no platform or device. Build: cc -o opencl opencl.c -lOpenCL
#define CL_TARGET_OPENCL_VERSION 120
#include <CL/cl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { COUNT = 1 << 20, MAX_PIECES = 4096 };
#define MIB ((size_t)1 << 20)
#define CHECK(error, what)                                             \
	do {                                                               \
		if ((error) != CL_SUCCESS) {                                   \
			fprintf(stderr, "%s: OpenCL error %d\n", what, (int)(error)); \
			exit(1);                                                   \
		}                                                              \
	} while (0)

static const char *text = "kernel void triple(global uint *v) { size_t i = get_global_id(0); v[i] = v[i] * 3u + 1u; }";
static cl_context context;
static cl_command_queue queue;
static cl_kernel kernel;
static cl_mem values;
static cl_uint host[COUNT];

static void open_device(void) {
	cl_platform_id platform;
	cl_device_id device;
	cl_uint n = 0;
	char name[256] = "";
	cl_ulong total = 0, largest = 0;
	cl_int e = clGetPlatformIDs(1, &platform, &n);
	if (e == CL_SUCCESS && n > 0) e = clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, 1, &device, &n);
	if (e != CL_SUCCESS || n == 0) {
		fprintf(stderr, "no OpenCL device: error %d\n", e);
		exit(3);
	}
	clGetDeviceInfo(device, CL_DEVICE_NAME, sizeof name, name, NULL);
	clGetDeviceInfo(device, CL_DEVICE_GLOBAL_MEM_SIZE, sizeof total, &total, NULL);
	clGetDeviceInfo(device, CL_DEVICE_MAX_MEM_ALLOC_SIZE, sizeof largest, &largest, NULL);
	printf("device %s\ntotal_MiB %zu largest_MiB %zu\n", name, (size_t)total / MIB, (size_t)largest / MIB);
	context = clCreateContext(NULL, 1, &device, NULL, NULL, &e);
	CHECK(e, "clCreateContext");
	queue = clCreateCommandQueue(context, device, 0, &e);
	CHECK(e, "clCreateCommandQueue");
	cl_program program = clCreateProgramWithSource(context, 1, &text, NULL, &e);
	CHECK(e, "clCreateProgramWithSource");
	CHECK(clBuildProgram(program, 1, &device, "", NULL, NULL), "clBuildProgram");
	kernel = clCreateKernel(program, "triple", &e);
	CHECK(e, "clCreateKernel");
	values = clCreateBuffer(context, CL_MEM_READ_WRITE, sizeof host, NULL, &e);
	CHECK(e, "clCreateBuffer");
	CHECK(clSetKernelArg(kernel, 0, sizeof values, &values), "clSetKernelArg");
}

static void compute(void) {
	size_t count = COUNT;
	for (cl_uint i = 0; i < COUNT; i++) host[i] = i;
	CHECK(clEnqueueWriteBuffer(queue, values, CL_TRUE, 0, sizeof host, host, 0, NULL, NULL), "clEnqueueWriteBuffer");
	CHECK(clEnqueueNDRangeKernel(queue, kernel, 1, NULL, &count, NULL, 0, NULL, NULL), "clEnqueueNDRangeKernel");
	CHECK(clEnqueueReadBuffer(queue, values, CL_TRUE, 0, sizeof host, host, 0, NULL, NULL), "clEnqueueReadBuffer");
	for (cl_uint i = 0; i < COUNT; i++)
		if (host[i] != i * 3u + 1u) {
			printf("value %u is %u: wrong\n", i, host[i]);
			exit(1);
		}
	printf("compute right 1\n");
	fflush(stdout);
}

// fill: a buffer may have no memory until it is written to.
static void fill(size_t piece, size_t max) {
	static cl_mem pieces[MAX_PIECES];
	int count = 0;
	size_t sum = 0;
	cl_int e = CL_SUCCESS;
	while (piece >= MIB && count < MAX_PIECES && sum < max) {
		cl_uchar byte = 1;
		pieces[count] = clCreateBuffer(context, CL_MEM_READ_WRITE, piece, NULL, &e);
		if (e == CL_SUCCESS) {
			e = clEnqueueWriteBuffer(queue, pieces[count], CL_TRUE, piece - 1, 1, &byte, 0, NULL, NULL);
			if (e != CL_SUCCESS) clReleaseMemObject(pieces[count]);
		}
		if (e != CL_SUCCESS) {
			piece /= 2;
			continue;
		}
		sum += piece;
		count++;
	}
	printf("allocated_MiB %zu pieces %d result %d refused %d\n", sum / MIB, count, e,
		e == CL_MEM_OBJECT_ALLOCATION_FAILURE || e == CL_OUT_OF_RESOURCES || e == CL_OUT_OF_HOST_MEMORY);
	fflush(stdout);
	if (count > 0) clReleaseMemObject(pieces[count - 1]);
}

int main(int argc, char **argv) {
	open_device();
	compute();
	if (argc > 3 && !strcmp(argv[1], "fill")) {
		fill(atoi(argv[2]) * MIB, atoi(argv[3]) * MIB);
		compute();
	}
	return 0;
}
