// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// TestManyHandles: no call goes through all handles that its container has. It compares the guard with itself: the quickest of many calls
// beside tens of thousands of handles and beside a few, of which the first took thousands of times as long as the second.
func TestManyHandles(t *testing.T) {
	const many, few, calls, worse = 30000, 3, 40, 100
	alloc := func(class, parent uint32, fill func(p []byte)) func(*fakeCall) uint32 {
		return func(c *fakeCall) uint32 {
			form, _ := c.guard.abi.Class(class)
			p := make([]byte, form.ParamsSize)
			if fill != nil {
				fill(p)
			}
			return allocStatus(c, parent, class, p)
		}
	}
	const subdevice = 0x5c000020
	for name, call := range map[string]func(*fakeCall) uint32{
		"memory": alloc(classVidmem, fakeDevice, func(p []byte) { rm.PutU64(p, rm.MemorySize, 2<<20) }),
		"a notification": alloc(0x79, fakeDevice, func(p []byte) {
			rm.PutU32(p, 0, fakeClient)
			rm.PutU32(p, 8, 0x79)
		}),
		"an address space":      alloc(0x90f1, fakeDevice, nil),
		"a channel group":       alloc(classChannelGroup, fakeDevice, nil),
		"memory for other GPUs": alloc(classPeerMemory, subdevice, nil),
		"a range of addresses":  alloc(classVirtual, fakeDevice, func(p []byte) { rm.PutU64(p, rm.MemorySize, 2<<20) }),
		"a second handle": func(c *fakeCall) uint32 {
			o := make([]byte, rm.DupSize)
			putWords(o, 0, fakeClient, fakeDevice, ours, fakeClient, fakeMemory)
			c.escape(rm.EscDupObject, o)
			return rm.U32(o, rm.DupStatus)
		},
	} {
		t.Run(name, func(t *testing.T) {
			best := func(handles uint32) time.Duration {
				g := withClient(newFakeGuard(t, &fakeDriver{}))
				below := object{handle: subdevice, parent: fakeDevice, class: 0x2080, kind: rm.ClassSubdevice, gpu: noGPU}
				g.account.addObject(fakeClient, below, noGPU, 0, 0)
				for i := range handles {
					g.account.addObject(fakeClient, memoryObject(0x5d000000+i, fakeDevice), 0, 0, 0)
				}
				c := newFakeCall(t, g, fakeControl)
				best := time.Hour
				for range calls {
					begin := time.Now()
					if s := call(c); s != rm.StatusOK {
						t.Fatal(rm.StatusName(s))
					}
					f := make([]byte, rm.FreeSize)
					putWords(f, 0, fakeClient, 0, ours)
					if c.escape(rm.EscFree, f); rm.U32(f, rm.FreeStatus) != rm.StatusOK {
						t.Fatal(rm.StatusName(rm.U32(f, rm.FreeStatus)))
					}
					best = min(best, time.Since(begin))
				}
				return best
			}
			if beside, alone := best(many), best(few); beside > worse*alone {
				t.Errorf("%v beside %d handles, %v beside %d", beside, many, alone, few)
			}
		})
	}
}
