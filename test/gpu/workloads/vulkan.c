// Vulkan without a window: the heaps and their budgets, a compute shader whose result is checked, memory.
//   vulkan                      the shader alone
//   vulkan fill MIB [MAX_MIB]   and memory in pieces of MIB (then of half, down to 1 MiB) until it is refused; the shader then runs again
//   vulkan export MIB MAX_MIB   and memory exported to file descriptors and freed by its handle, until it is refused: it must still count
//   vulkan spin SECONDS [ROUNDS]
//                               and the shader over and over, two at a time, of so many rounds (else: some 2 ms): how often it ran
//   vulkan long MS SECONDS      and one dispatch of so long after the other; each of its threads takes all of it
//   vulkan turn SECONDS         and dispatches of 1 ms, one after the other: how long the longest took
// Prints a line of keys and values for each. Exit status 3: there is no instance, 4: no device. Build: cc -o vulkan vulkan.c -lvulkan
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <vulkan/vulkan.h>

#include "vulkan.comp.h"

enum { COUNT = 1 << 16, ROUNDS = 100, MAX_PIECES = 4096 };
#define MIB ((VkDeviceSize)1 << 20)
#define CHECK(call)                                                              \
	do {                                                                         \
		VkResult r_ = (call);                                                    \
		if (r_ != VK_SUCCESS) {                                                  \
			fprintf(stderr, "%s:%d: %s: VkResult %d\n", __FILE__, __LINE__, #call, r_); \
			exit(1);                                                             \
		}                                                                        \
	} while (0)

static VkPhysicalDevice gpu;
static VkDevice device;
static VkQueue queue;
static VkCommandPool pool;
static VkPipeline pipeline;
static VkPipelineLayout layout;
static VkDescriptorSet set;
static VkDeviceMemory values;
static VkPhysicalDeviceMemoryProperties memory;
static uint32_t family;
static int has_budget, has_export;

static double now(void) {
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec * 1e-9;
}

// type of memory that has these properties, out of those allowed
static uint32_t type_of(uint32_t allowed, VkMemoryPropertyFlags want) {
	for (uint32_t i = 0; i < memory.memoryTypeCount; i++)
		if (allowed >> i & 1 && (memory.memoryTypes[i].propertyFlags & want) == want) return i;
	fprintf(stderr, "no memory type with properties %#x\n", want);
	exit(1);
}

static void open_device(void) {
	VkApplicationInfo app = {.sType = VK_STRUCTURE_TYPE_APPLICATION_INFO, .apiVersion = VK_API_VERSION_1_1};
	VkInstanceCreateInfo info = {.sType = VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO, .pApplicationInfo = &app};
	VkInstance instance;
	VkResult r = vkCreateInstance(&info, NULL, &instance);
	if (r != VK_SUCCESS) {
		fprintf(stderr, "vkCreateInstance: VkResult %d\n", r);
		exit(3);
	}
	VkPhysicalDevice list[8];
	uint32_t n = 8;
	r = vkEnumeratePhysicalDevices(instance, &n, list);
	if (r < 0 || n == 0) {
		fprintf(stderr, "vkEnumeratePhysicalDevices: VkResult %d, %u devices\n", r, n);
		exit(4);
	}
	gpu = list[0];
	VkPhysicalDeviceProperties p;
	vkGetPhysicalDeviceProperties(gpu, &p);
	printf("device %s vendor %#x devices %u\n", p.deviceName, p.vendorID, n);

	static VkExtensionProperties extensions[512];
	n = 512;
	if (vkEnumerateDeviceExtensionProperties(gpu, NULL, &n, extensions) < 0) n = 0;
	const char *use[2];
	uint32_t used = 0;
	for (uint32_t i = 0; i < n; i++) {
		if (!strcmp(extensions[i].extensionName, VK_EXT_MEMORY_BUDGET_EXTENSION_NAME)) has_budget = 1, use[used++] = extensions[i].extensionName;
		if (!strcmp(extensions[i].extensionName, VK_KHR_EXTERNAL_MEMORY_FD_EXTENSION_NAME)) has_export = 1, use[used++] = extensions[i].extensionName;
	}
	VkQueueFamilyProperties families[16];
	n = 16;
	vkGetPhysicalDeviceQueueFamilyProperties(gpu, &n, families);
	for (family = 0; family < n && !(families[family].queueFlags & VK_QUEUE_COMPUTE_BIT); family++) {}
	float priority = 1;
	VkDeviceQueueCreateInfo q = {.sType = VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO, .queueFamilyIndex = family, .queueCount = 1, .pQueuePriorities = &priority};
	VkDeviceCreateInfo d = {.sType = VK_STRUCTURE_TYPE_DEVICE_CREATE_INFO, .queueCreateInfoCount = 1, .pQueueCreateInfos = &q, .enabledExtensionCount = used, .ppEnabledExtensionNames = use};
	CHECK(vkCreateDevice(gpu, &d, NULL, &device));
	vkGetDeviceQueue(device, family, 0, &queue);
	vkGetPhysicalDeviceMemoryProperties(gpu, &memory);
}

// report_heaps: total_MiB is the largest heap of the device's own.
static void report_heaps(void) {
	VkPhysicalDeviceMemoryBudgetPropertiesEXT budget = {.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_BUDGET_PROPERTIES_EXT};
	VkPhysicalDeviceMemoryProperties2 m = {.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_PROPERTIES_2, .pNext = has_budget ? &budget : NULL};
	vkGetPhysicalDeviceMemoryProperties2(gpu, &m);
	VkDeviceSize largest = 0, left = 0, usage = 0;
	for (uint32_t i = 0; i < m.memoryProperties.memoryHeapCount; i++) {
		VkMemoryHeap h = m.memoryProperties.memoryHeaps[i];
		if (h.flags & VK_MEMORY_HEAP_DEVICE_LOCAL_BIT && h.size > largest) largest = h.size, left = budget.heapBudget[i], usage = budget.heapUsage[i];
	}
	printf("heaps %u total_MiB %llu budget_MiB %llu usage_MiB %llu\n", m.memoryProperties.memoryHeapCount, (unsigned long long)(largest / MIB),
		(unsigned long long)(left / MIB), (unsigned long long)(usage / MIB));
}

static void make_pipeline(void) {
	VkBufferCreateInfo b = {.sType = VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO, .size = COUNT * 4, .usage = VK_BUFFER_USAGE_STORAGE_BUFFER_BIT};
	VkBuffer buffer;
	CHECK(vkCreateBuffer(device, &b, NULL, &buffer));
	VkMemoryRequirements need;
	vkGetBufferMemoryRequirements(device, buffer, &need);
	VkMemoryAllocateInfo a = {.sType = VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_INFO, .allocationSize = need.size,
		.memoryTypeIndex = type_of(need.memoryTypeBits, VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | VK_MEMORY_PROPERTY_HOST_COHERENT_BIT)};
	CHECK(vkAllocateMemory(device, &a, NULL, &values));
	CHECK(vkBindBufferMemory(device, buffer, values, 0));

	VkShaderModuleCreateInfo s = {.sType = VK_STRUCTURE_TYPE_SHADER_MODULE_CREATE_INFO, .codeSize = sizeof vulkan_comp, .pCode = vulkan_comp};
	VkShaderModule shader;
	CHECK(vkCreateShaderModule(device, &s, NULL, &shader));
	VkDescriptorSetLayoutBinding binding = {.descriptorType = VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, .descriptorCount = 1, .stageFlags = VK_SHADER_STAGE_COMPUTE_BIT};
	VkDescriptorSetLayoutCreateInfo sl = {.sType = VK_STRUCTURE_TYPE_DESCRIPTOR_SET_LAYOUT_CREATE_INFO, .bindingCount = 1, .pBindings = &binding};
	VkDescriptorSetLayout set_layout;
	CHECK(vkCreateDescriptorSetLayout(device, &sl, NULL, &set_layout));
	VkPushConstantRange push = {VK_SHADER_STAGE_COMPUTE_BIT, 0, 4};
	VkPipelineLayoutCreateInfo pl = {.sType = VK_STRUCTURE_TYPE_PIPELINE_LAYOUT_CREATE_INFO, .setLayoutCount = 1, .pSetLayouts = &set_layout,
		.pushConstantRangeCount = 1, .pPushConstantRanges = &push};
	CHECK(vkCreatePipelineLayout(device, &pl, NULL, &layout));
	VkComputePipelineCreateInfo c = {.sType = VK_STRUCTURE_TYPE_COMPUTE_PIPELINE_CREATE_INFO, .layout = layout,
		.stage = {.sType = VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_CREATE_INFO, .stage = VK_SHADER_STAGE_COMPUTE_BIT, .module = shader, .pName = "main"}};
	CHECK(vkCreateComputePipelines(device, VK_NULL_HANDLE, 1, &c, NULL, &pipeline));

	VkDescriptorPoolSize size = {VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, 1};
	VkDescriptorPoolCreateInfo dp = {.sType = VK_STRUCTURE_TYPE_DESCRIPTOR_POOL_CREATE_INFO, .maxSets = 1, .poolSizeCount = 1, .pPoolSizes = &size};
	VkDescriptorPool sets;
	CHECK(vkCreateDescriptorPool(device, &dp, NULL, &sets));
	VkDescriptorSetAllocateInfo da = {.sType = VK_STRUCTURE_TYPE_DESCRIPTOR_SET_ALLOCATE_INFO, .descriptorPool = sets, .descriptorSetCount = 1, .pSetLayouts = &set_layout};
	CHECK(vkAllocateDescriptorSets(device, &da, &set));
	VkDescriptorBufferInfo whole = {buffer, 0, VK_WHOLE_SIZE};
	VkWriteDescriptorSet w = {.sType = VK_STRUCTURE_TYPE_WRITE_DESCRIPTOR_SET, .dstSet = set, .descriptorCount = 1,
		.descriptorType = VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, .pBufferInfo = &whole};
	vkUpdateDescriptorSets(device, 1, &w, 0, NULL);

	VkCommandPoolCreateInfo p = {.sType = VK_STRUCTURE_TYPE_COMMAND_POOL_CREATE_INFO, .queueFamilyIndex = family};
	CHECK(vkCreateCommandPool(device, &p, NULL, &pool));
}

// record makes a command buffer that runs the shader for so many rounds.
static VkCommandBuffer record(uint32_t rounds) {
	VkCommandBufferAllocateInfo a = {.sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_ALLOCATE_INFO, .commandPool = pool, .commandBufferCount = 1};
	VkCommandBuffer c;
	CHECK(vkAllocateCommandBuffers(device, &a, &c));
	VkCommandBufferBeginInfo b = {.sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO, .flags = VK_COMMAND_BUFFER_USAGE_SIMULTANEOUS_USE_BIT};
	CHECK(vkBeginCommandBuffer(c, &b));
	vkCmdBindPipeline(c, VK_PIPELINE_BIND_POINT_COMPUTE, pipeline);
	vkCmdBindDescriptorSets(c, VK_PIPELINE_BIND_POINT_COMPUTE, layout, 0, 1, &set, 0, NULL);
	vkCmdPushConstants(c, layout, VK_SHADER_STAGE_COMPUTE_BIT, 0, 4, &rounds);
	vkCmdDispatch(c, COUNT / 256, 1, 1);
	CHECK(vkEndCommandBuffer(c));
	return c;
}

static VkFence fence(void) {
	VkFenceCreateInfo f = {.sType = VK_STRUCTURE_TYPE_FENCE_CREATE_INFO};
	VkFence made;
	CHECK(vkCreateFence(device, &f, NULL, &made));
	return made;
}

static void submit(VkCommandBuffer c, VkFence f) {
	VkSubmitInfo s = {.sType = VK_STRUCTURE_TYPE_SUBMIT_INFO, .commandBufferCount = 1, .pCommandBuffers = &c};
	CHECK(vkQueueSubmit(queue, 1, &s, f));
}

static double timed(uint32_t rounds) {
	VkFence f = fence();
	double begin = now();
	submit(record(rounds), f);
	CHECK(vkWaitForFences(device, 1, &f, VK_TRUE, 20000000000));
	return now() - begin;
}

static void compute(void) {
	uint32_t *p;
	CHECK(vkMapMemory(device, values, 0, VK_WHOLE_SIZE, 0, (void **)&p));
	for (uint32_t i = 0; i < COUNT; i++) p[i] = i;
	timed(ROUNDS);
	for (uint32_t i = 0; i < COUNT; i++) {
		uint32_t want = i;
		for (int r = 0; r < ROUNDS; r++) want = want * 1664525u + 1013904223u;
		if (p[i] != want) {
			printf("value %u is %u, want %u: wrong\n", i, p[i], want);
			exit(1);
		}
	}
	vkUnmapMemory(device, values);
	printf("compute right 1\n");
	fflush(stdout);
}

static VkDeviceMemory pieces[MAX_PIECES];
static int count;

static void fill(VkDeviceSize piece, VkDeviceSize max, int exported) {
	VkExportMemoryAllocateInfo e = {.sType = VK_STRUCTURE_TYPE_EXPORT_MEMORY_ALLOCATE_INFO, .handleTypes = VK_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD_BIT};
	VkMemoryAllocateInfo a = {.sType = VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_INFO, .pNext = exported ? &e : NULL, .memoryTypeIndex = type_of(~0u, VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT)};
	PFN_vkGetMemoryFdKHR get = (PFN_vkGetMemoryFdKHR)vkGetDeviceProcAddr(device, "vkGetMemoryFdKHR");
	VkDeviceSize sum = 0;
	VkResult r = VK_SUCCESS;
	while (piece >= MIB && count < MAX_PIECES && sum < max) {
		a.allocationSize = piece;
		r = vkAllocateMemory(device, &a, NULL, &pieces[count]);
		if (r == VK_SUCCESS && exported) { // the descriptor alone keeps it; it is never closed
			VkMemoryGetFdInfoKHR g = {.sType = VK_STRUCTURE_TYPE_MEMORY_GET_FD_INFO_KHR, .memory = pieces[count], .handleType = e.handleTypes};
			int fd;
			r = get(device, &g, &fd);
			vkFreeMemory(device, pieces[count], NULL);
		}
		if (r != VK_SUCCESS) {
			piece /= 2;
			continue;
		}
		count += !exported;
		sum += piece;
	}
	printf("%s_MiB %llu pieces %d result %d refused %d\n", exported ? "exported" : "allocated", (unsigned long long)(sum / MIB), count, r,
		r == VK_ERROR_OUT_OF_DEVICE_MEMORY);
}

static uint32_t rounds_of(double each) {
	uint32_t rounds = 1000;
	for (int i = 0; i < 3; i++) {
		double took = timed(rounds);
		rounds = (uint32_t)(rounds * each / (took > 1e-6 ? took : 1e-6)) + 1;
	}
	return rounds;
}

static void spin(double seconds, uint32_t rounds) {
	VkCommandBuffer c = record(rounds);
	VkFence f[2] = {fence(), fence()};
	submit(c, f[0]);
	submit(c, f[1]);
	long runs = 0;
	for (double begin = now(); now() - begin < seconds; runs++) {
		VkFence *first = &f[runs & 1];
		CHECK(vkWaitForFences(device, 1, first, VK_TRUE, 20000000000));
		CHECK(vkResetFences(device, 1, first));
		submit(c, *first);
	}
	CHECK(vkQueueWaitIdle(queue));
	printf("runs %ld rounds %u work %.0f\n", runs, rounds, (double)runs * rounds / 1e3);
}

// one_by_one runs dispatches that take so long each. Their number grows by steps, so that none is much too long.
static void one_by_one(double each, double seconds) {
	uint32_t rounds = 1000;
	double took = timed(rounds), begin, worst = 0, sum = 0;
	for (int i = 0; i < 30 && took < each * 0.9; i++) {
		double more = each / took;
		rounds = (uint32_t)(rounds * (more > 8 ? 8 : more)) + 1;
		took = timed(rounds);
	}
	printf("long rounds %u took_ms %.2f\n", rounds, took * 1e3);
	fflush(stdout);
	long runs = 0;
	for (begin = now(); now() - begin < seconds; runs++) {
		took = timed(rounds);
		sum += took;
		if (took > worst) worst = took;
	}
	printf("runs %ld mean_us %.0f worst_us %.0f\n", runs, sum / (double)(runs ? runs : 1) * 1e6, worst * 1e6);
}

int main(int argc, char **argv) {
	const char *what = argc > 1 ? argv[1] : "";
	open_device();
	report_heaps();
	make_pipeline();
	compute();
	if (!strcmp(what, "fill") && argc > 2) {
		fill(atoi(argv[2]) * MIB, (argc > 3 ? atoi(argv[3]) : 1 << 20) * MIB, 0);
		report_heaps();
		if (count > 0) vkFreeMemory(device, pieces[--count], NULL);
		compute();
	} else if (!strcmp(what, "export") && argc > 3) {
		if (!has_export) {
			printf("no export\n");
			return 0;
		}
		fill(atoi(argv[2]) * MIB, atoi(argv[3]) * MIB, 1);
		compute();
	} else if (!strcmp(what, "spin") && argc > 2) {
		spin(atof(argv[2]), argc > 3 ? (uint32_t)atol(argv[3]) : rounds_of(0.002)); // beside others it would take a turn for work
	} else if (!strcmp(what, "long") && argc > 3) {
		one_by_one(atof(argv[2]) * 1e-3, atof(argv[3]));
	} else if (!strcmp(what, "turn") && argc > 2) {
		one_by_one(1e-3, atof(argv[2]));
	}
	return 0;
}
