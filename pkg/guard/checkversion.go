// SPDX-License-Identifier: Apache-2.0

package guard

import "golang.org/x/sys/unix"

// checkVersion tells a library whether it is of the driver's version, without the driver: that would write to the kernel log each time
// that it is not, and a container may ask as often as it likes.
func (g *Guard) checkVersion(c *trappedCall) plan {
	if c.node.kind != nodeControl {
		return answer(fail(unix.EINVAL)) // NV_CTL_DEVICE_ONLY
	}
	if g.abi.CheckVersion(c.call.Outer, g.cfg.DriverVersion) {
		return answer(replyDone)
	}
	g.logOnce("version", "refused a library of another version than the driver's", "driver", g.cfg.DriverVersion, "pid", c.task.proc.tgid)
	if c.valid() { // nvidia_ioctl tells the version although it fails
		writeMemory(c.task.tid, c.changedParts(nil))
	}
	return answer(fail(unix.EINVAL))
}
