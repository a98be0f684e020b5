// SPDX-License-Identifier: Apache-2.0

package hostrun

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/admit"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/spec"
)

// way is how an entry of the host's /dev comes into the run's.
type way int

const (
	leaveOut way = iota
	bindFile     // the host's own node, with its owner and mode
	bindTree     // a folder and what is mounted in it: pts, shm, infiniband
	copyLink
	makeNode // anew, with the same numbers
	graphics // the folder dri, without the nodes of NVIDIA's cards
)

// wayOf decides on an entry of /dev. own are folders of the simulated driver's nodes.
func wayOf(name string, mode fs.FileMode, own []string) way {
	switch {
	case strings.HasPrefix(name, "nvidia"), slices.Contains(own, name):
		return leaveOut // the run's own are made after
	case mode&fs.ModeSymlink != 0:
		return copyLink
	case name == "dri" && mode.IsDir():
		return graphics
	case mode.IsDir():
		return bindTree
	case name == "ptmx":
		// The kernel finds the pseudo terminals in the folder pts beside it, which it would not do from a mount.
		return makeNode
	}
	return bindFile
}

// ownFolders are the entries of /dev that hold the simulated driver's nodes.
func ownFolders(p spec.Plan) []string {
	var names []string
	for _, n := range slices.Concat(p.Nodes(), p.Hidden) {
		if rest, ok := strings.CutPrefix(n.HostPath, "/dev/"); ok && n.Bind {
			name, _, _ := strings.Cut(rest, "/")
			names = append(names, name)
		}
	}
	return names
}

// stageName is a folder of the run directory, in which what a run is to see is put together in mounts of its own.
const stageName = "dev"

// plainNodes are what any program may need of /dev.
var plainNodes = []string{"null", "zero", "full", "random", "urandom"}

// mountDev gives this mount namespace a /dev of its own: the host's, but of NVIDIA's nodes those of the run and no others.
// It is a file system of its own also because the guard tells by that which files were opened by the run.
func mountDev(p spec.Plan, runDir string) error {
	stage := filepath.Join(runDir, stageName)
	if err := os.MkdirAll(stage, 0o700); err != nil {
		return err
	}
	if err := unix.Mount("cgpu-dev", stage, "tmpfs", unix.MS_NOSUID|unix.MS_STRICTATIME, "mode=755,size=1m"); err != nil {
		return fmt.Errorf("mount a tmpfs: %w", err)
	}
	entries, err := os.ReadDir("/dev")
	if err != nil {
		return err
	}
	own := ownFolders(p)
	for _, e := range entries {
		if p.DomainServer && !slices.Contains(plainNodes, e.Name()) {
			continue
		}
		info, err := e.Info()
		if errors.Is(err, fs.ErrNotExist) { // unplugged
			continue
		}
		if err == nil {
			err = bring(wayOf(e.Name(), info.Mode(), own), filepath.Join("/dev", e.Name()), filepath.Join(stage, e.Name()))
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("/dev/%s: %w", e.Name(), err)
		}
	}
	for _, n := range p.Nodes() {
		if err := giveNode(n, filepath.Join(stage, strings.TrimPrefix(n.Path, "/dev/"))); err != nil {
			return fmt.Errorf("%s: %w", n.Path, err)
		}
	}
	if err := unix.Mount(stage, "/dev", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("put it into its place: %w", err)
	}
	return nil
}

// bring puts one entry of the host's /dev into the run's.
func bring(w way, from, to string) error {
	switch w {
	case bindFile:
		return bind(from, to, 0)
	case bindTree:
		if err := os.Mkdir(to, 0o755); err != nil {
			return err
		}
		return unix.Mount(from, to, "", unix.MS_BIND|unix.MS_REC, "")
	case copyLink:
		target, err := os.Readlink(from)
		if err != nil {
			return err
		}
		return os.Symlink(target, to)
	case makeNode:
		var st unix.Stat_t
		if err := unix.Stat(from, &st); err != nil {
			return err
		}
		if err := unix.Mknod(to, st.Mode, int(st.Rdev)); err != nil {
			return err
		}
		return errors.Join(os.Chmod(to, fs.FileMode(st.Mode&0o777)), os.Chown(to, int(st.Uid), int(st.Gid)))
	case graphics:
		return bringGraphics(from, to)
	}
	return nil
}

// bringGraphics leaves NVIDIA's cards out of dri: by them one can allocate the card's memory past the guard.
func bringGraphics(from, to string) error {
	if err := os.Mkdir(to, 0o755); err != nil {
		return err
	}
	if err := os.Chmod(to, 0o755); err != nil { // whatever the umask
		return err
	}
	entries, err := os.ReadDir(from)
	if err != nil {
		return err
	}
	for _, e := range entries {
		var st unix.Stat_t
		path := filepath.Join(from, e.Name())
		if err := unix.Lstat(path, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFCHR {
			continue // by-path: names for the nodes beside it
		}
		if admit.IsNVIDIA(device.Node{Major: unix.Major(st.Rdev), Minor: unix.Minor(st.Rdev)}) {
			continue
		}
		if err := bind(path, filepath.Join(to, e.Name()), 0); err != nil {
			return err
		}
	}
	return nil
}

// giveNode makes a node of the run. Whoever runs here may open it, whatever the host's node allows: with
// NVreg_DeviceFileMode=0600 a card can only be reached through cgpu.
func giveNode(n device.Node, to string) error {
	if n.Bind {
		return bind(n.HostPath, to, unix.MS_NOSUID|unix.MS_NOEXEC)
	}
	err := unix.Mknod(to, unix.S_IFCHR|0o666, int(unix.Mkdev(n.Major, n.Minor)))
	if err != nil {
		return err
	}
	return os.Chmod(to, 0o666) // whatever the umask
}

// bind mounts a file, or a folder, over a new empty one. With flags it is mounted again, for flags count from the second time on.
func bind(from, to string, flags uintptr) error {
	if info, err := os.Stat(from); err != nil {
		return err
	} else if info.IsDir() {
		if err := os.Mkdir(to, 0o700); err != nil {
			return err
		}
	} else {
		fd, err := unix.Open(to, unix.O_CREAT|unix.O_EXCL|unix.O_RDONLY|unix.O_CLOEXEC, 0o600)
		if err != nil {
			return err
		}
		unix.Close(fd)
	}
	if err := unix.Mount(from, to, "", unix.MS_BIND, ""); err != nil {
		return err
	}
	if flags == 0 {
		return nil
	}
	return unix.Mount("", to, "", unix.MS_BIND|unix.MS_REMOUNT|flags, "")
}

// mountLimiter puts the preload library, the vGPU page and the pipes of its domain where containers have them. That is the host's run
// directory: its ledger and sockets are out of the run's sight, as they are out of a container's.
func mountLimiter(p spec.Plan) error {
	dir := filepath.Dir(page.Path)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	// The files may lie in what is about to be covered.
	files := []struct {
		from, to string
		flags    uintptr
	}{
		{p.Page, page.Path, unix.MS_RDONLY | inert},
		{p.Limiter, spec.LimiterPath, unix.MS_RDONLY | unix.MS_NOSUID | unix.MS_NODEV},
		{p.Pipes(), page.PipesPath, unix.MS_RDONLY | inert},
	}
	for i, f := range files {
		if f.from == "" {
			continue
		}
		fd, err := unix.Open(f.from, unix.O_PATH|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("%s: %w", f.from, err)
		}
		defer unix.Close(fd)
		files[i].from = "/proc/self/fd/" + strconv.Itoa(fd)
	}
	const flags = unix.MS_NOSUID | unix.MS_NODEV
	if err := mountTmpfs(dir, flags, "mode=755,size=64k"); err != nil {
		return err
	}
	for _, f := range files {
		if f.from == "" {
			continue
		}
		if err := bind(f.from, f.to, f.flags); err != nil {
			return fmt.Errorf("%s: %w", f.to, err)
		}
	}
	if p.DomainServer {
		if err := mountDaemon(filepath.Join(page.PipesPath, page.Daemon)); err != nil {
			return err
		}
	}
	return unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_RDONLY|flags, "mode=755,size=64k")
}

// mountDaemon gives the daemon of a domain a folder for its sockets and its logs, which members can make grow: it is bounded, and goes with
// the server. Its guard, who is root without a privilege, reads the file there.
func mountDaemon(dir string) error {
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return err
	}
	options := fmt.Sprintf("mode=711,size=1m,nr_inodes=64,uid=%d,gid=%d", st.Uid, st.Gid)
	if err := mountTmpfs(dir, inert, options); err != nil {
		return err
	}
	ended := filepath.Join(dir, page.Ended)
	return errors.Join(os.WriteFile(ended, nil, 0o644), os.Chown(ended, int(st.Uid), int(st.Gid)))
}

// keepDeviceNodes tells the driver's libraries not to make nodes, as cgpu-hook does in a container: as root they would make
// those of all GPUs. The copy is made in dir, which is the run's own: whoever is killed here leaves nothing on the host.
func keepDeviceNodes(dir, params string) error {
	text, err := os.ReadFile(params)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	kept := strings.ReplaceAll(string(text), "ModifyDeviceFiles: 1", "ModifyDeviceFiles: 0")
	if kept == string(text) {
		return nil // also in a cgpu run, whose file has no name, so that nothing can be mounted over it
	}
	f, err := os.CreateTemp(dir, ".params-*")
	if err != nil {
		return err
	}
	defer f.Close()
	defer os.Remove(f.Name()) // the mount keeps the file
	if _, err = f.WriteString(kept); err == nil {
		err = f.Chmod(0o444)
	}
	if err == nil {
		err = unix.Mount(f.Name(), params, "", unix.MS_BIND, "")
	}
	if err == nil {
		err = unix.Mount("", params, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
	}
	if err != nil {
		return fmt.Errorf("mount over %s: %w", params, err)
	}
	return nil
}

// sealDev makes /dev read-only: a set-user-ID nvidia-modprobe that is made unable to read the parameters would make nodes of all GPUs, for
// everybody. Nodes are opened for writing all the same, and pts, shm and mqueue are mounts of their own.
func sealDev() error {
	return unix.Mount("", "/dev", "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_STRICTATIME, "")
}

// workingFolder is where this thread is: the path, or empty where there is none.
func workingFolder() string {
	b := make([]byte, unix.PathMax)
	n, err := unix.Getcwd(b)
	if err != nil || n < 2 || b[0] != '/' { // "(unreachable)…", or a folder that was removed
		return ""
	}
	return string(b[:n-1])
}

// returnTo enters a working folder below /dev again: until then it is one of the /dev before. The user does it himself, since
// he may have put something else there meanwhile. One without a path may have been below /dev.
func returnTo(dir string) error {
	if dir != "" && dir != "/dev" && !strings.HasPrefix(dir, "/dev/") {
		return nil
	}
	if dir != "" && unix.Chdir(dir) == nil {
		return nil
	}
	return unix.Chdir("/")
}

// drmMajor is the kernel's number of the nodes in /dev/dri.
const drmMajor = 226

// nvidiaMajor is the driver's own number (NV_MAJOR_DEVICE_NUMBER), also on a node whose table has not been made.
const nvidiaMajor = 195

// Majors are the device numbers that a standard input, output or error must not have: with them it leads past the run's own /dev. nodes
// are those of the driver.
func Majors(nodes []device.Node) []uint32 {
	majors := []uint32{drmMajor, nvidiaMajor}
	for _, n := range nodes {
		if !n.Bind && !slices.Contains(majors, n.Major) {
			majors = append(majors, n.Major)
		}
	}
	return majors
}

// CheckFiles refuses a standard input, output or error that leads past the run's own /dev. nodes are those of the driver.
func CheckFiles(nodes []device.Node) error {
	for fd, name := range []string{"standard input", "standard output", "standard error"} {
		var st unix.Stat_t
		if unix.Fstat(fd, &st) == nil && leadsPast(st.Mode, unix.Major(st.Rdev), Majors(nodes)) {
			return fmt.Errorf("run: %s: is a folder or the node of a graphics card, which a run does not take along: redirect it elsewhere", name)
		}
	}
	return nil
}

// leadsPast judges an open file. A folder counts, since its /dev, or the one below it, is the host's.
func leadsPast(mode, major uint32, majors []uint32) bool {
	switch mode & unix.S_IFMT {
	case unix.S_IFDIR:
		return true
	case unix.S_IFCHR:
		return slices.Contains(majors, major)
	}
	return false
}
