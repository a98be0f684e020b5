// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"errors"
	"flag"
	"fmt"
	"runtime"
	"syscall"
	"unsafe"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// UVM takes address spaces and channels of RM clients by their handles (UVM_REGISTER_GPU_VASPACE, UVM_REGISTER_CHANNEL) and ignores the
// file that should vouch for them: kernel-open/nvidia-uvm/uvm_va_space.c, create_gpu_va_space; uvm_user_channel.c.

// uvmSharing is UVM_INIT_FLAGS_MULTI_PROCESS_SHARING_MODE. Without it, and without UVM_MM_INITIALIZE on a second file, every
// UVM_REGISTER_GPU_VASPACE fails with 0x5d before the driver looks at the handles.
const uvmSharing = 2

// channelRegion is where UVM puts the buffers of registered channels, a GiB for each.
const channelRegion = 0x60_0000_0000

// errNoUVM says that nobody answers UVM's calls.
type errNoUVM struct{ error }

// gpuUVM is an open nvidia-uvm that knows the first GPU of a client.
type gpuUVM struct {
	c    *client
	fd   int
	uuid []byte
}

func (c *client) openGPUUVM() (*gpuUVM, error) {
	gid := make([]byte, 268)
	rm.PutU32(gid, 4, 2) // binary
	if err := c.control(c.subdevice, 0x2080014a, gid); err != nil {
		return nil, err
	}
	fd, err := syscall.Open("/dev/nvidia-uvm", syscall.O_RDWR|syscall.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("/dev/nvidia-uvm: %w", err)
	}
	u := &gpuUVM{c: c, fd: fd, uuid: gid[12:28]}
	init := make([]byte, rm.UVMInitializeSize)
	rm.PutU64(init, rm.UVMInitializeFlags, uvmSharing)
	err = u.ioctl("UVM_INITIALIZE", rm.UVMInitialize, init, rm.UVMInitializeStatus)
	if err == nil {
		b := u.params(40)
		rm.PutU32(b, 24, uint32(c.fd))
		rm.PutU32(b, 28, c.handle)
		err = u.ioctl("UVM_REGISTER_GPU", rm.UVMRegisterGPU, b, 36)
	}
	if err != nil && realDriver() {
		u.close()
		return nil, err
	}
	return u, nil // the simulated driver needs neither call
}

func (u *gpuUVM) close() { syscall.Close(u.fd) }

// params are parameters that begin with the GPU's UUID.
func (u *gpuUVM) params(size int) []byte {
	b := make([]byte, size)
	copy(b, u.uuid)
	return b
}

func (u *gpuUVM) ioctl(what string, cmd uintptr, b []byte, status int) error {
	rm.PutU32(b, status, 0xbad)
	errno := u.c.call(u.fd, cmd, unsafe.Pointer(unsafe.SliceData(b)))
	runtime.KeepAlive(b)
	if st := rm.U32(b, status); errno != 0 || st != rm.StatusOK {
		err := &rmError{what: what, errno: errno, status: st}
		if errno != 0 && !realDriver() {
			return errNoUVM{err}
		}
		return err
	}
	return nil
}

func (u *gpuUVM) registerSpace(client, space uint32) error {
	b := u.params(32)
	rm.PutU32(b, 16, uint32(u.c.fd))
	rm.PutU32(b, 20, client)
	rm.PutU32(b, 24, space)
	return u.ioctl("UVM_REGISTER_GPU_VASPACE", rm.UVMRegisterGPUVASpace, b, 28)
}

func (u *gpuUVM) registerChannel(client, channel uint32, base uint64) error {
	b := u.params(56)
	rm.PutU32(b, 16, uint32(u.c.fd))
	rm.PutU32(b, 20, client)
	rm.PutU32(b, 24, channel)
	rm.PutU64(b, 32, base)
	rm.PutU64(b, 40, 1<<30)
	return u.ioctl("UVM_REGISTER_CHANNEL", rm.UVMRegisterChannel, b, 48)
}

// ownSpace makes an address space of the client's own and registers it: where that does not work no other attempt means anything.
func (c *client) ownSpace() (u *gpuUVM, space uint32, err error) {
	if u, err = c.openGPUUVM(); err != nil {
		return nil, 0, err
	}
	if space, err = c.addressSpace(vaspaceForUVM); err == nil {
		err = u.registerSpace(c.handle, space)
	}
	print("own_space=%s", describe(err))
	if err == nil {
		return u, space, nil
	}
	u.close()
	if _, ok := errors.AsType[errNoUVM](err); ok {
		return nil, 0, skip("the simulated driver has no UVM")
	}
	return nil, 0, fmt.Errorf("the own address space is refused, so the attack proves nothing: %w", err)
}

// hostileRetain frees contexts whose channels UVM has registered. UVM keeps their buffers and their channel IDs until its file is closed,
// so they must stay charged until then.
func hostileRetain(hostileOptions) error {
	watch, _, before, err := openCounted(patient) // a client that stays
	if err != nil {
		return err
	}
	defer watch.close()
	c, err := openGPU(patient)
	if err != nil {
		return err
	}
	defer c.close()
	u, space, err := c.ownSpace()
	if err != nil {
		return err
	}
	defer u.close()
	var retained quota.Bytes
	for i := range uint64(4) {
		cost, err := u.retainOne(watch, space, channelRegion+i<<30)
		if err != nil {
			return err
		}
		retained += cost
		_, free, err := watch.usage()
		if err != nil {
			return err
		}
		print("freed_contexts=%d\nretained_kib=%d\ncharged_kib=%d", i+1, retained/quota.KiB, (before-min(before, free))/quota.KiB)
		if before-min(before, free) < retained {
			return fmt.Errorf("UVM holds %v of %d freed contexts, %v are charged", retained, i+1, before-min(before, free))
		}
	}
	c.close()
	if _, free, err := watch.usage(); err != nil {
		return err
	} else if before-min(before, free) < retained {
		return fmt.Errorf("the client is gone and UVM still holds %v: %v are charged", retained, before-min(before, free))
	}
	u.close()
	return eventually(func() error { return watch.expectFree("end", before, 0) })
}

// retainOne makes a context, has UVM register its channel, and frees it. It returns what the context costs.
func (u *gpuUVM) retainOne(watch *client, space uint32, base uint64) (quota.Bytes, error) {
	_, before, err := watch.usage()
	if err != nil {
		return 0, err
	}
	x, err := u.c.rawContext(space)
	if err != nil {
		return 0, fmt.Errorf("make a context: %w", err)
	}
	if err := u.registerChannel(u.c.handle, x.channel, base); err != nil {
		return 0, err
	}
	_, after, err := watch.usage()
	if err != nil {
		return 0, err
	}
	if err := u.c.free(x.group); err != nil {
		return 0, err
	}
	return before - min(before, after+userdSize), u.c.free(x.userd)
}

// openTwoUVM makes a client, a UVM address space with an address space of its own registered, and one without: what the second is
// refused is then not refused for want of a first.
func openTwoUVM() (c *client, u, other *gpuUVM, err error) {
	if c, err = openGPU(patient); err != nil {
		return nil, nil, nil, err
	}
	if u, _, err = c.ownSpace(); err != nil {
		c.close()
		return nil, nil, nil, err
	}
	if other, err = c.openGPUUVM(); err != nil {
		u.close()
		c.close()
		return nil, nil, nil, err
	}
	return c, u, other, nil
}

// hostileSteal guesses the handles of other containers' address spaces and channels. Whatever it names, the answer must be that of what
// does not exist: else handles of neighbours can be counted.
func hostileSteal(o hostileOptions) error {
	c, u, other, err := openTwoUVM()
	if err != nil {
		return err
	}
	defer c.close()
	defer u.close()
	defer other.close()
	answers := map[string]int{}
	for i := range uint32(min(o.tries, 256)) {
		client := 0xc1d00000 + i
		if client == c.handle {
			continue
		}
		for object := range uint32(8) {
			space := other.registerSpace(client, firstProbeHandle+object)
			channel := u.registerChannel(client, firstProbeHandle+object, channelRegion)
			if space == nil || channel == nil {
				return fmt.Errorf("client %#x, object %#x: taken as an address space: %s, as a channel: %s", client, firstProbeHandle+object,
					describe(space), describe(channel))
			}
			answers["space "+describe(space)]++
			answers["channel "+describe(channel)]++
		}
	}
	print("answers=%v", answers)
	if len(answers) != 2 {
		return fmt.Errorf("the answers tell what others have: %v", answers)
	}
	return nil
}

// policy shares an object, or with the client's own handle all that the client has, by a policy of a type (RS_SHARE_TYPE_*).
func (c *client) policy(object uint32, kind byte) error {
	b := make([]byte, rm.ShareSize)
	rm.PutU32(b, rm.ShareClient, c.handle)
	rm.PutU32(b, rm.ShareObject, object)
	rm.PutU32(b, rm.SharePolicy+rm.SharePolicyTarget, c.handle)
	rm.PutU32(b, rm.SharePolicy+rm.SharePolicyAccess, 1)
	b[rm.SharePolicy+rm.SharePolicyType] = kind
	rm.PutU32(b, rm.ShareStatus, 0xbad)
	errno := c.call.escape(c.fd, rm.EscShare, b)
	if st := rm.U32(b, rm.ShareStatus); errno != 0 || st != rm.StatusOK {
		return &rmError{what: fmt.Sprintf("RM_SHARE of %#x", object), errno: errno, status: st}
	}
	return nil
}

// cmdVASHold is the victim of cmdSteal.
func cmdVASHold(args []string) error {
	fs := flag.NewFlagSet("vas-hold", flag.ExitOnError)
	share := fs.Uint("share", 0, "share it by a policy of this type; 1: with all, 2: with the same user")
	whole := fs.Bool("client", false, "share all of the client")
	_ = fs.Parse(args)
	c, err := openGPU(patient)
	if err != nil {
		return err
	}
	defer c.close()
	space, err := c.addressSpace(vaspaceForUVM)
	if err != nil {
		return err
	}
	own, err := c.addressSpace(0)
	if err != nil {
		return err
	}
	x, err := c.rawContext(own)
	if err != nil {
		return err
	}
	if *share != 0 {
		object := space
		if *whole {
			object = c.handle
		}
		print("share=%s", describe(c.policy(object, byte(*share))))
	}
	print("client=%#x\nvaspace=%#x\nchannel=%#x", c.handle, space, x.channel)
	return wait("")
}

// cmdSteal has UVM take another container's address space and channel, and compares the answers with those for what does not exist.
func cmdSteal(args []string) error {
	var handle [3]uint32
	for i := range handle {
		var err error
		if handle[i], err = handleArg(arg(args, i)); err != nil {
			return err
		}
	}
	c, u, other, err := openTwoUVM()
	if err != nil {
		return err
	}
	defer c.close()
	defer u.close()
	defer other.close()
	const none = 0x5cffffff // a handle that nothing has
	for _, try := range []struct {
		what         string
		foreign, not error
	}{
		{"space", other.registerSpace(handle[0], handle[1]), other.registerSpace(handle[0], none)},
		{"channel", u.registerChannel(handle[0], handle[2], channelRegion), u.registerChannel(handle[0], none, channelRegion)},
	} {
		print("%s=%s\nno_%s=%s", try.what, describe(try.foreign), try.what, describe(try.not))
		if try.foreign == nil {
			return fmt.Errorf("UVM has taken another container's %s", try.what)
		}
		if describe(try.foreign) != describe(try.not) {
			return fmt.Errorf("the answers tell of another container's %s: %s, and %s for one that does not exist", try.what,
				describe(try.foreign), describe(try.not))
		}
	}
	return nil
}
