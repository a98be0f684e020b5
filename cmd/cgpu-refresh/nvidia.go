// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package main

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/nvmlclient"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// nvidia fills the table from NVML and nvcdi and writes it.
func (r refresh) nvidia(t *device.Table, driverRoot string, before device.Key) error {
	if err := readModules("/proc").makeNodes("/dev"); err != nil {
		r.warn("%v", err)
	}
	lib, root, shutdown, err := openNVML(driverRoot)
	if err != nil {
		return err
	}
	defer shutdown()
	var ret nvml.Return
	if t.DriverVersion, ret = lib.SystemGetDriverVersion(); ret != nvml.SUCCESS {
		return fmt.Errorf("NVML: driver version: %w", ret)
	}
	if t.Config.DriverLimits {
		if err := hasLimits(lib, t.Config.Limits(), lib.Extensions().LookupSymbol, nvmlclient.CgroupRoot); err != nil {
			return err
		}
	}
	if t.GPUs, err = listGPUs(lib, t.Guarded(), lib.Extensions().LookupSymbol, r.warn); err != nil {
		return err
	}
	for i := range t.GPUs {
		g := &t.GPUs[i]
		if g.Node, err = hostNode(fmt.Sprintf("/dev/nvidia%d", g.Minor)); err != nil {
			return fmt.Errorf("GPU %d: %w; run nvidia-smi once, which makes the nodes", g.Index, err)
		}
	}
	if err := makeUVMNode(); err != nil {
		r.warn("%v", err)
	}
	for _, path := range []string{"/dev/nvidiactl", "/dev/nvidia-uvm"} {
		n, err := hostNode(path)
		if err != nil {
			return fmt.Errorf("%w; run nvidia-modprobe -c 0 -u, which loads the module and makes the node", err)
		}
		t.Nodes = append(t.Nodes, n)
	}
	files, err := discover(lib, root, foldersOf(root), r.say)
	if err != nil {
		// NVML works, so containers that bring the driver's libraries themselves do too: better than none. The next
		// change of the driver, a boot or cgpu refresh --force looks again.
		r.warn("no driver files for containers: %v; containers must bring the libraries of driver %s themselves "+
			"(put the folder of libcuda.so.%[2]s into the ld cache, then cgpu refresh --force)", err, t.DriverVersion)
	}
	files.addLibraries(readELF, r.warn)
	t.Mounts, t.Links, t.LibDirs, t.Libraries, t.Env = files.mounts, files.links, files.libDirs, files.libraries, files.env
	// Before the shutdown: while NVML holds the driver open it cannot be exchanged, so the key is that of what was read.
	return r.save(t, before, files.libcuda(t.DriverVersion))
}

// openNVML loads the library from where the dynamic linker finds it, else from a driver folder outside its reach
// (hosted nodes mount the driver at /usr/local/nvidia, Google's at /home/kubernetes/bin/nvidia), else from a root folder of the driver's.
// configured is driver_root of cgpu.toml.
func openNVML(configured string) (lib nvml.Interface, root string, shutdown func(), err error) {
	ret := nvml.ERROR_LIBRARY_NOT_FOUND
	for _, p := range places(configured, driverRoots, driverDirs()) {
		var options []nvml.LibraryOption
		if p.library != "" {
			options = append(options, nvml.WithLibraryPath(p.library))
		}
		lib := nvml.New(options...)
		if ret = lib.Init(); ret == nvml.SUCCESS {
			return lib, p.root, func() { _ = lib.Shutdown() }, nil
		}
		if ret != nvml.ERROR_LIBRARY_NOT_FOUND { // a second library in one process would be called for the first one's functions
			return nil, "", nil, fmt.Errorf("NVML of %s: %w: want a loaded NVIDIA driver that fits %s (nvidia-smi tells more); "+
				"driver_root in cgpu.toml says where the driver is, if not there", p.root, ret, cmp.Or(p.library, nvmlFile))
		}
	}
	if configured != "" {
		return nil, "", nil,
			fmt.Errorf("driver_root = %q in cgpu.toml: no NVIDIA driver (%s) there: want a folder that has it in usr/lib64 or the like", configured,
				nvmlFile)
	}
	return nil, "", nil, fmt.Errorf("no NVIDIA driver (%s): install one, or put the folder of its libraries into the ld cache; "+
		`driver_root in cgpu.toml names another root than %s; driver = "sim" is the simulated driver`, nvmlFile, strings.Join(driverRoots, ", "))
}

// foldersOf are the library folders of a driver's root that nvcdi may not find by itself.
func foldersOf(root string) []string {
	if root == "/" {
		return driverDirs()
	}
	return below(root)
}

// listGPUs lists the GPUs that can be shared, by guards or without. has tells whether the library knows a function: calling one that it
// lacks kills the process.
func listGPUs(lib nvml.Interface, guarded bool, has func(symbol string) error, warn func(string, ...any)) ([]device.GPU, error) {
	count, ret := lib.DeviceGetCount()
	if ret != nvml.SUCCESS {
		return nil, fmt.Errorf("NVML: number of GPUs: %w", ret)
	}
	var list []device.GPU
	for i := range count {
		g, err := gpu(lib, i, has)
		if err == nil && guarded && unguarded[g.Architecture] {
			err = fmt.Errorf(`%s is a GPU of %s, and a guard needs Volta or newer; enforcement = "preload" in cgpu.toml shares it without one`,
				g.Name, g.Architecture)
		}
		if err != nil { // a lost GPU must not take the others with it
			warn("GPU %d is left out: %v", i, err)
			continue
		}
		list = append(list, g)
	}
	if len(list) == 0 {
		return nil, fmt.Errorf("NVML: none of %d GPUs can be shared", count)
	}
	nvlinks(lib, list, has)
	return list, nil
}

func gpu(lib nvml.Interface, index int, has func(symbol string) error) (device.GPU, error) {
	g := device.GPU{Index: index}
	fault := func(what string, ret nvml.Return) (device.GPU, error) {
		return device.GPU{}, fmt.Errorf("NVML: %s: %w", what, ret)
	}
	d, ret := lib.DeviceGetHandleByIndex(index)
	if ret != nvml.SUCCESS {
		return fault("handle", ret)
	}
	if has("nvmlDeviceGetMigMode") == nil {
		if current, _, ret := d.GetMigMode(); ret == nvml.SUCCESS && current == nvml.DEVICE_MIG_ENABLE {
			return device.GPU{}, errors.New("MIG mode is on, and cgpu shares whole GPUs; nvidia-smi -mig 0 turns it off")
		}
	}
	if g.UUID, ret = d.GetUUID(); ret != nvml.SUCCESS {
		return fault("UUID", ret)
	}
	g.UUID = lowerUUID(g.UUID)
	if g.Minor, ret = d.GetMinorNumber(); ret != nvml.SUCCESS {
		return fault("minor number", ret)
	}
	if g.Name, ret = d.GetName(); ret != nvml.SUCCESS {
		return fault("name", ret)
	}
	pci, ret := d.GetPciInfo()
	if ret != nvml.SUCCESS {
		return fault("PCI address", ret)
	}
	g.BusID = fmt.Sprintf("%04x:%02x:%02x.0", pci.Domain, pci.Bus, pci.Device)
	memory, ret := d.GetMemoryInfo()
	if ret != nvml.SUCCESS {
		return fault("memory", ret)
	}
	g.Memory = quota.Bytes(memory.Total)
	g.Architecture, g.ComputeCapability = traits(d, has)
	return g, nil
}

// lowerUUID writes the hexadecimal digits as the driver does, in lower case.
func lowerUUID(u string) string {
	prefix, digits, ok := strings.Cut(u, "-")
	if !ok {
		return u
	}
	return prefix + "-" + strings.ToLower(digits)
}

// discover asks nvcdi for the files of the driver that is installed below root. Its own search (standard folders, then the ld
// cache) comes first; dirs are tried after it, because folders that are named replace its search.
func discover(lib nvml.Interface, root string, dirs []string, log func(string, ...any)) (driverFiles, error) {
	if err := addBinaries(dirs); err != nil {
		return driverFiles{}, err
	}
	files, first := commonEdits(lib, root, nil, log)
	if first == nil {
		return files, nil
	}
	for _, dir := range dirs {
		if files, err := commonEdits(lib, root, []string{dir}, log); err == nil {
			return files, nil
		}
	}
	return driverFiles{}, first
}

func commonEdits(lib nvml.Interface, root string, dirs []string, log func(string, ...any)) (driverFiles, error) {
	c, err := nvcdi.New(
		nvcdi.WithMode(nvcdi.ModeNvml),
		nvcdi.WithNvmlLib(lib),
		nvcdi.WithDriverRoot(root),
		nvcdi.WithLibrarySearchPaths(dirs),
		nvcdi.WithLogger(logger(log)),
		// Not for a tenant: the sockets of nvidia-persistenced, the fabric manager and MPS.
		nvcdi.WithFeatureFlags(nvcdi.FeatureDisableIPCDiscoverer, nvcdi.FeatureDisableNvsandboxUtils,
			nvcdi.FeatureNoAdditionalGIDsForDeviceNodes),
	)
	if err != nil {
		return driverFiles{}, err
	}
	edits, err := c.GetCommonEdits()
	if err != nil {
		return driverFiles{}, err
	}
	return translate(edits.ContainerEdits), nil
}

// driverDirs are folders outside the ld cache that may hold the driver's libraries: first the one that NVML was loaded
// from.
func driverDirs() []string {
	var dirs []string
	add := func(dir string) {
		if filepath.IsAbs(dir) && !slices.Contains(dirs, dir) && exists(dir) {
			dirs = append(dirs, dir)
		}
	}
	if f, err := os.Open("/proc/self/maps"); err == nil {
		defer f.Close()
		for s := bufio.NewScanner(f); s.Scan(); {
			if _, path, ok := strings.Cut(s.Text(), "/"); ok && strings.HasPrefix(filepath.Base(path), "libnvidia-ml.so.") {
				add(filepath.Dir("/" + path))
			}
		}
	}
	for dir := range strings.SplitSeq(os.Getenv("LD_LIBRARY_PATH"), ":") {
		add(dir)
	}
	add("/usr/local/nvidia/lib64")
	add("/usr/local/nvidia/lib")
	add("/home/kubernetes/bin/nvidia/lib64")
	return dirs
}

// addBinaries puts the bin folders beside the libraries behind PATH, where nvcdi looks for nvidia-smi: an engine's PATH
// knows only the standard ones.
func addBinaries(dirs []string) error {
	path := os.Getenv("PATH")
	for _, dir := range dirs {
		if bin := filepath.Join(filepath.Dir(dir), "bin"); exists(filepath.Join(bin, "nvidia-smi")) &&
			!slices.Contains(filepath.SplitList(path), bin) {
			path += ":" + bin
		}
	}
	return os.Setenv("PATH", path)
}

// makeUVMNode makes /dev/nvidia-uvm where it is missing: unlike the others it appears only with the first CUDA program.
func makeUVMNode() error {
	if exists("/dev/nvidia-uvm") {
		return nil
	}
	if out, err := exec.Command("nvidia-modprobe", "-c", "0", "-u").CombinedOutput(); err != nil {
		return fmt.Errorf("nvidia-modprobe -c 0 -u: %w %s", err, strings.TrimSpace(string(out)))
	}
	return nil
}

// logger gives nvcdi's messages to a printing function. Its warnings tell of optional files that are not there.
type logger func(format string, args ...any)

func (l logger) Debugf(string, ...any)               {}
func (l logger) Tracef(string, ...any)               {}
func (l logger) Infof(format string, args ...any)    { l("nvcdi: "+format, args...) }
func (l logger) Warningf(format string, args ...any) { l("nvcdi: "+format, args...) }
func (l logger) Errorf(format string, args ...any)   { l("nvcdi: "+format, args...) }
