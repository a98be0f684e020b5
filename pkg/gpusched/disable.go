// SPDX-License-Identifier: Apache-2.0

package gpusched

import (
	"syscall"

	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/rmclient"
)

// FIFO_DISABLE_CHANNELS stops channels, also in the middle of a kernel, and lets them run again: 0.6 ms and 0.2 ms for one
// CUDA context on an H200. The driver takes channels of any client.
const (
	controlDisableChannels = 0x2080110b
	disableSize            = 536
	disableFlag            = 0
	disableCount           = 4
	disableRewind          = 9
	disableClients         = 24
	disableChannels        = 280
	disableMax             = 64
)

// chanState is what FIFO_DISABLE_CHANNELS makes of a channel.
type chanState uint8

const (
	chanRuns    chanState = iota
	chanPaused            // off until it is let run
	chanStopped           // off, and what is queued is dropped (bRewindGpPut)
)

const refusedMessage = "the driver refuses to pause or resume a channel"

// disableAll carries one out for channels of a GPU, 64 at a time, and counts those that the driver did so with. One that is gone meanwhile
// makes it refuse the whole list: then they are taken one by one. What is gone counts too.
func disableAll(own *rmclient.Client, gpu int, channels []Channel, to chanState,
	isGone func(Channel), refused func(status uint32, e syscall.Errno)) (done int) {
	for len(channels) > 0 {
		list := channels[:min(len(channels), disableMax)]
		channels = channels[len(list):]
		if status, e := disable(own, gpu, list, to); e == 0 && status == rm.StatusOK {
			done += len(list)
			continue
		}
		for i := range list {
			status, e := disable(own, gpu, list[i:i+1], to)
			if e != 0 || status != rm.StatusOK && !gone(status) {
				refused(status, e)
				continue
			}
			if done++; status != rm.StatusOK {
				isGone(list[i])
			}
		}
	}
	return done
}

func (s chanState) verb() string {
	switch s {
	case chanRuns:
		return "resume"
	case chanPaused:
		return "pause"
	}
	return "stop"
}

// gone reports a status that says that a channel is not there any more.
func gone(status uint32) bool {
	switch status {
	case statusInvalidChannel, rm.StatusInvalidClient, rm.StatusInvalidObjectHandle, rm.StatusObjectNotFound:
		return true
	}
	return false
}

const statusInvalidChannel = 0x21 // NV_ERR_INVALID_CHANNEL

// disable is the control, for up to disableMax channels.
func disable(own *rmclient.Client, gpu int, channels []Channel, to chanState) (uint32, syscall.Errno) {
	p := make([]byte, disableSize)
	if to != chanRuns {
		p[disableFlag] = 1
	}
	if to == chanStopped {
		p[disableRewind] = 1
	}
	rm.PutU32(p, disableCount, uint32(len(channels)))
	for i, ch := range channels {
		rm.PutU32(p, disableClients+4*i, ch.Client)
		rm.PutU32(p, disableChannels+4*i, ch.Handle)
	}
	return own.Control(own.Subdevice(gpu), controlDisableChannels, p)
}
