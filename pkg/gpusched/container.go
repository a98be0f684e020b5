// SPDX-License-Identifier: Apache-2.0

package gpusched

import (
	"syscall"

	"github.com/opencgpu/cgpu/pkg/rmclient"
)

// Container is what GPU time is told of the container. GPUs are named by their place in the configuration. It is called with locks of the
// scheduler's held, and so calls none of the scheduler's methods but TellChannels.
type Container interface {
	// Groups lists the channel groups on a GPU's graphics engine. A group that has two handles is in it twice.
	Groups(gpu int) []Group
	// Channels lists the channels of those groups; with all, those on other engines too.
	Channels(gpu int, all bool) []Channel
	// GoOn leaves out the channels of which nothing is to run again: that UVM has ended, and of clients that end. The
	// list is a new one.
	GoOn([]Channel) []Channel
	// Gone is told of a channel that the driver says is gone.
	Gone(Channel)
	// Owners lists who made the container's RM clients, by which the driver names contexts.
	Owners() map[int]bool
	// Guests lists processes of other containers that have handles on groups of this one (trust domains).
	Guests() []int
	// File finds the file that a client lives on.
	File(Client) (File, bool)
	// UserPage opens the user-driver page of a channel; nil: it has none.
	UserPage(gpu int, ch Channel) (*UserPage, error)
	// RM is the guard's own client, with the container's GPUs.
	RM() (*rmclient.Client, error)
}

// Client is one of the container's RM clients. Its handle can be another client's later, but that is not equal.
type Client interface {
	Handle() uint32
	PID() int // of the process that made it
}

// Group is a channel group.
type Group struct {
	Client Client
	Handle uint32
	Of     any // what it is a handle of: the same for all handles of a group
}

// Channel is a channel.
type Channel struct {
	Client, Handle uint32
	PID            int // of the process that made the client
	// Object is what the container knows it by: the handle can be another's later.
	Object any
}

// File is a client's file, copied back from the container to make calls in the client's name.
type File interface {
	// Hold keeps the program from freeing groups of the client, and leaves out those that are gone: a control of what is gone leaves a line
	// in the kernel log. It waits for no call that takes long, or a program could keep its timeslice by such calls.
	Hold([]Group) (living []Group, release func())
	// Control makes a control on an object of the client.
	Control(object, cmd uint32, params []byte) (status uint32, errno syscall.Errno)
	// Close closes the copy. To keep it would hold the client's memory when the container has closed it.
	Close()
}

// Control makes a control in the name of a client.
type Control func(object, cmd uint32, params []byte) (status uint32, errno syscall.Errno)

// UserPage is the user-driver page of a channel: how far the GPU has come in the channel's queue (GP_GET) and how far the program has
// filled it (GP_PUT).
type UserPage struct {
	Words []byte // UserWords of them at least, aligned to 4, changed by the GPU and the program
	Close func()
}
