// SPDX-License-Identifier: Apache-2.0
// Asks a Vulkan driver what it is and what it makes of a compute shader; answers in JSON.
//
//     probe info                              limits and features of the first device
//     probe pipeline FILE.spv STORAGE PUSH    creates the pipeline, prints the driver's statistics
//
// A pipeline's layout is the one of all kernels: a uniform buffer at binding 0, STORAGE storage
// buffers from binding 1, PUSH bytes of push constants. Exit status 1 and a line on stderr if the
// driver refuses; a compiler that hangs or aborts is the caller's to deal with.
#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define VK_NO_PROTOTYPES
#include <vulkan/vulkan.h>

static PFN_vkGetInstanceProcAddr get;
static VkInstance instance;

#define CALL(name) ((PFN_##name)find(#name))

static PFN_vkVoidFunction find(const char *name)
{
    PFN_vkVoidFunction f = get(instance, name);
    if (!f) {
        fprintf(stderr, "probe: the driver has no %s\n", name);
        exit(1);
    }
    return f;
}

static void must(VkResult result, const char *what)
{
    if (result < 0) {
        fprintf(stderr, "probe: %s: VkResult %d\n", what, result);
        exit(1);
    }
}

static VkPhysicalDevice open_device(void)
{
    void *loader = dlopen("libvulkan.so.1", RTLD_NOW);
    if (!loader) {
        fprintf(stderr, "probe: %s\n", dlerror());
        exit(1);
    }
    get = (PFN_vkGetInstanceProcAddr)dlsym(loader, "vkGetInstanceProcAddr");
    VkApplicationInfo app = {.sType = VK_STRUCTURE_TYPE_APPLICATION_INFO,
                             .apiVersion = VK_API_VERSION_1_2};
    VkInstanceCreateInfo info = {.sType = VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO,
                                 .pApplicationInfo = &app};
    VkInstance made;
    must(CALL(vkCreateInstance)(&info, NULL, &made), "vkCreateInstance");
    instance = made;
    uint32_t n = 1;
    VkPhysicalDevice device = VK_NULL_HANDLE;
    must(CALL(vkEnumeratePhysicalDevices)(instance, &n, &device), "vkEnumeratePhysicalDevices");
    if (!n) {
        fprintf(stderr, "probe: the driver found no device\n");
        exit(1);
    }
    return device;
}

// ---------------------------------------------------------------- info

static const char *comma = "";

static void number(const char *name, unsigned long long value)
{
    printf("%s\n  \"%s\": %llu", comma, name, value);
    comma = ",";
}

static void triple(const char *name, const uint32_t *v)
{
    printf("%s\n  \"%s\": [%u, %u, %u]", comma, name, v[0], v[1], v[2]);
    comma = ",";
}

static void text(const char *name, const char *value)
{
    printf("%s\n  \"%s\": \"", comma, name);
    for (; *value; value++)
        printf(*value == '"' || *value == '\\' ? "\\%c" : "%c", *value);
    printf("\"");
    comma = ",";
}

static void print_info(VkPhysicalDevice device)
{
    VkPhysicalDeviceShaderIntegerDotProductProperties pdot = {
        .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_INTEGER_DOT_PRODUCT_PROPERTIES};
    VkPhysicalDeviceVulkan12Properties p12 = {
        .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_PROPERTIES, .pNext = &pdot};
    VkPhysicalDeviceVulkan11Properties p11 = {
        .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_PROPERTIES, .pNext = &p12};
    VkPhysicalDeviceProperties2 p = {.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2,
                                     .pNext = &p11};
    CALL(vkGetPhysicalDeviceProperties2)(device, &p);
    VkPhysicalDeviceShaderIntegerDotProductFeatures fdot = {
        .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_INTEGER_DOT_PRODUCT_FEATURES};
    VkPhysicalDeviceVulkan12Features f12 = {
        .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_FEATURES, .pNext = &fdot};
    VkPhysicalDeviceVulkan11Features f11 = {
        .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_FEATURES, .pNext = &f12};
    VkPhysicalDeviceFeatures2 f = {.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2,
                                   .pNext = &f11};
    CALL(vkGetPhysicalDeviceFeatures2)(device, &f);
    VkQueueFamilyProperties queue[8];
    uint32_t families = 8;
    CALL(vkGetPhysicalDeviceQueueFamilyProperties)(device, &families, queue);
    const VkPhysicalDeviceLimits *l = &p.properties.limits;

    printf("{");
    text("deviceName", p.properties.deviceName);
    text("driverName", p12.driverName);
    text("driverInfo", p12.driverInfo);
    triple("apiVersion", (uint32_t[]){VK_API_VERSION_MAJOR(p.properties.apiVersion),
                                      VK_API_VERSION_MINOR(p.properties.apiVersion),
                                      VK_API_VERSION_PATCH(p.properties.apiVersion)});
#define LIMIT(name) number(#name, l->name)
    LIMIT(maxComputeWorkGroupInvocations);
    LIMIT(maxComputeSharedMemorySize);
    LIMIT(maxPerStageDescriptorStorageBuffers);
    LIMIT(maxDescriptorSetStorageBuffers);
    LIMIT(maxPerStageDescriptorUniformBuffers);
    LIMIT(maxPushConstantsSize);
    LIMIT(maxStorageBufferRange);
    LIMIT(maxUniformBufferRange);
    LIMIT(minStorageBufferOffsetAlignment);
    triple("maxComputeWorkGroupSize", l->maxComputeWorkGroupSize);
    triple("maxComputeWorkGroupCount", l->maxComputeWorkGroupCount);
    number("timestampValidBits", families ? queue[0].timestampValidBits : 0);
    number("queueFamilies", families);
    number("queueCount", families ? queue[0].queueCount : 0);
    number("subgroupSize", p11.subgroupSize);
    number("subgroupSupportedStages", p11.subgroupSupportedStages);
    number("subgroupSupportedOperations", p11.subgroupSupportedOperations);
    number("maxMemoryAllocationSize", p11.maxMemoryAllocationSize);
#define CORE(name) number(#name, f.features.name)
    CORE(shaderFloat64);
    CORE(shaderInt64);
    CORE(shaderInt16);
    CORE(robustBufferAccess);
    CORE(fragmentStoresAndAtomics);
    CORE(shaderStorageBufferArrayDynamicIndexing);
#define F11(name) number(#name, f11.name)
    F11(storageBuffer16BitAccess);
    F11(uniformAndStorageBuffer16BitAccess);
#define F12(name) number(#name, f12.name)
    F12(shaderFloat16);
    F12(shaderInt8);
    F12(storageBuffer8BitAccess);
    F12(uniformAndStorageBuffer8BitAccess);
    F12(timelineSemaphore);
    F12(bufferDeviceAddress);
    F12(scalarBlockLayout);
    F12(vulkanMemoryModel);
    F12(vulkanMemoryModelDeviceScope);
    F12(shaderSubgroupExtendedTypes);
    number("shaderIntegerDotProduct", fdot.shaderIntegerDotProduct);
    number("integerDotProduct4x8BitPackedSignedAccelerated",
           pdot.integerDotProduct4x8BitPackedSignedAccelerated);

    uint32_t n = 0;
    PFN_vkEnumerateDeviceExtensionProperties enumerate = CALL(vkEnumerateDeviceExtensionProperties);
    must(enumerate(device, NULL, &n, NULL), "vkEnumerateDeviceExtensionProperties");
    VkExtensionProperties *e = calloc(n + 1, sizeof *e);
    must(enumerate(device, NULL, &n, e), "vkEnumerateDeviceExtensionProperties");
    printf(",\n  \"extensions\": [");
    for (uint32_t i = 0; i < n; i++)
        printf("%s\n    \"%s\"", i ? "," : "", e[i].extensionName);
    printf("]\n}\n");
    free(e);
}

// ---------------------------------------------------------------- pipeline

static uint32_t *read_words(const char *path, size_t *bytes)
{
    FILE *file = fopen(path, "rb");
    if (!file || fseek(file, 0, SEEK_END)) {
        perror(path);
        exit(1);
    }
    *bytes = (size_t)ftell(file);
    rewind(file);
    uint32_t *words = malloc(*bytes + 4);
    if (!words || fread(words, 1, *bytes, file) != *bytes) {
        fprintf(stderr, "probe: %s cannot be read\n", path);
        exit(1);
    }
    fclose(file);
    return words;
}

static VkDevice make_device(VkPhysicalDevice physical)
{
    VkPhysicalDevicePipelineExecutablePropertiesFeaturesKHR statistics = {
        .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PIPELINE_EXECUTABLE_PROPERTIES_FEATURES_KHR};
    VkPhysicalDeviceShaderIntegerDotProductFeatures dot = {
        .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_INTEGER_DOT_PRODUCT_FEATURES,
        .pNext = &statistics};
    VkPhysicalDeviceVulkan12Features f12 = {
        .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_FEATURES, .pNext = &dot};
    VkPhysicalDeviceVulkan11Features f11 = {
        .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_FEATURES, .pNext = &f12};
    VkPhysicalDeviceFeatures2 f = {.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2,
                                   .pNext = &f11};
    CALL(vkGetPhysicalDeviceFeatures2)(physical, &f);
    f.features.robustBufferAccess = VK_FALSE; // as the engine has it
    float priority = 1;
    VkDeviceQueueCreateInfo queue = {.sType = VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO,
                                     .queueCount = 1,
                                     .pQueuePriorities = &priority};
    const char *extensions[] = {VK_KHR_PIPELINE_EXECUTABLE_PROPERTIES_EXTENSION_NAME,
                                VK_KHR_SHADER_INTEGER_DOT_PRODUCT_EXTENSION_NAME};
    VkDeviceCreateInfo info = {.sType = VK_STRUCTURE_TYPE_DEVICE_CREATE_INFO,
                               .pNext = &f,
                               .queueCreateInfoCount = 1,
                               .pQueueCreateInfos = &queue,
                               .enabledExtensionCount = 2,
                               .ppEnabledExtensionNames = extensions};
    VkDevice device;
    must(CALL(vkCreateDevice)(physical, &info, NULL, &device), "vkCreateDevice");
    return device;
}

static VkPipeline make_pipeline(VkDevice device, const char *path, uint32_t storage, uint32_t push)
{
    size_t bytes;
    uint32_t *words = read_words(path, &bytes);
    VkDescriptorSetLayoutBinding *bindings = calloc(storage + 1, sizeof *bindings);
    for (uint32_t i = 0; i <= storage; i++)
        bindings[i] = (VkDescriptorSetLayoutBinding){
            .binding = i,
            .descriptorType = i ? VK_DESCRIPTOR_TYPE_STORAGE_BUFFER
                                : VK_DESCRIPTOR_TYPE_UNIFORM_BUFFER,
            .descriptorCount = 1,
            .stageFlags = VK_SHADER_STAGE_COMPUTE_BIT};
    VkDescriptorSetLayoutCreateInfo set_info = {
        .sType = VK_STRUCTURE_TYPE_DESCRIPTOR_SET_LAYOUT_CREATE_INFO,
        .bindingCount = storage + 1,
        .pBindings = bindings};
    VkDescriptorSetLayout set;
    must(CALL(vkCreateDescriptorSetLayout)(device, &set_info, NULL, &set),
         "vkCreateDescriptorSetLayout");
    VkPushConstantRange range = {VK_SHADER_STAGE_COMPUTE_BIT, 0, push};
    VkPipelineLayoutCreateInfo layout_info = {
        .sType = VK_STRUCTURE_TYPE_PIPELINE_LAYOUT_CREATE_INFO,
        .setLayoutCount = 1,
        .pSetLayouts = &set,
        .pushConstantRangeCount = push ? 1 : 0,
        .pPushConstantRanges = &range};
    VkPipelineLayout layout;
    must(CALL(vkCreatePipelineLayout)(device, &layout_info, NULL, &layout),
         "vkCreatePipelineLayout");
    VkShaderModuleCreateInfo module_info = {.sType = VK_STRUCTURE_TYPE_SHADER_MODULE_CREATE_INFO,
                                            .codeSize = bytes,
                                            .pCode = words};
    VkShaderModule module;
    must(CALL(vkCreateShaderModule)(device, &module_info, NULL, &module), "vkCreateShaderModule");
    VkComputePipelineCreateInfo info = {
        .sType = VK_STRUCTURE_TYPE_COMPUTE_PIPELINE_CREATE_INFO,
        .flags = VK_PIPELINE_CREATE_CAPTURE_STATISTICS_BIT_KHR,
        .stage = {.sType = VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_CREATE_INFO,
                  .stage = VK_SHADER_STAGE_COMPUTE_BIT,
                  .module = module,
                  .pName = "main"},
        .layout = layout};
    VkPipeline pipeline;
    must(CALL(vkCreateComputePipelines)(device, VK_NULL_HANDLE, 1, &info, NULL, &pipeline),
         "vkCreateComputePipelines");
    free(bindings);
    free(words);
    return pipeline;
}

static void print_statistics(VkDevice device, VkPipeline pipeline)
{
    VkPipelineInfoKHR info = {.sType = VK_STRUCTURE_TYPE_PIPELINE_INFO_KHR, .pipeline = pipeline};
    PFN_vkGetPipelineExecutablePropertiesKHR list = CALL(vkGetPipelineExecutablePropertiesKHR);
    uint32_t n = 1;
    VkPipelineExecutablePropertiesKHR executable = {
        .sType = VK_STRUCTURE_TYPE_PIPELINE_EXECUTABLE_PROPERTIES_KHR};
    must(list(device, &info, &n, &executable), "vkGetPipelineExecutablePropertiesKHR");
    if (n != 1) {
        fprintf(stderr, "probe: the driver tells nothing of the pipeline\n");
        exit(1);
    }
    VkPipelineExecutableInfoKHR which = {.sType = VK_STRUCTURE_TYPE_PIPELINE_EXECUTABLE_INFO_KHR,
                                         .pipeline = pipeline};
    VkPipelineExecutableStatisticKHR s[64];
    for (int i = 0; i < 64; i++)
        s[i] = (VkPipelineExecutableStatisticKHR){
            .sType = VK_STRUCTURE_TYPE_PIPELINE_EXECUTABLE_STATISTIC_KHR};
    n = 64;
    must(CALL(vkGetPipelineExecutableStatisticsKHR)(device, &which, &n, s),
         "vkGetPipelineExecutableStatisticsKHR");
    printf("{");
    number("Subgroup size", executable.subgroupSize);
    for (uint32_t i = 0; i < n; i++)
        if (s[i].format == VK_PIPELINE_EXECUTABLE_STATISTIC_FORMAT_UINT64_KHR)
            number(s[i].name, s[i].value.u64);
        else if (s[i].format == VK_PIPELINE_EXECUTABLE_STATISTIC_FORMAT_INT64_KHR)
            number(s[i].name, (unsigned long long)s[i].value.i64);
        else if (s[i].format == VK_PIPELINE_EXECUTABLE_STATISTIC_FORMAT_BOOL32_KHR)
            number(s[i].name, s[i].value.b32);
    printf("\n}\n");
}

int main(int argc, char **argv)
{
    if (argc == 2 && !strcmp(argv[1], "info")) {
        print_info(open_device());
    } else if (argc == 5 && !strcmp(argv[1], "pipeline")) {
        VkDevice device = make_device(open_device());
        uint32_t storage = (uint32_t)atoi(argv[3]), push = (uint32_t)atoi(argv[4]);
        print_statistics(device, make_pipeline(device, argv[2], storage, push));
    } else {
        fprintf(stderr, "usage: probe info | pipeline FILE.spv STORAGE PUSH\n");
        return 2;
    }
    return fflush(stdout) ? 1 : 0; // all that was made ends with the process
}
