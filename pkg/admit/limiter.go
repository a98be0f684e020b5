// SPDX-License-Identifier: Apache-2.0

package admit

import (
	"errors"
	"fmt"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/spec"
)

// toGuard is the remedy for all that preload mode cannot do.
const toGuard = `or set enforcement = "guard" in cgpu.toml`

// GivePage names the vGPU page of a reservation: before Reserve, so that what a killed runtime leaves behind belongs to a
// record. Where a guard enforces the limits a container may be without a page, as one with more GPUs than a page has room
// for is.
func GivePage(request *ledger.Request, runDir string) error {
	r := &request.Record
	gpus := len(r.VGPUs) + len(r.Native)
	switch {
	case r.DriverOnly: // nobody would read it
	case gpus <= page.MaxVGPUs:
		r.Page = page.File(runDir, r.Nonce)
	case r.Preload:
		return fmt.Errorf("admit: %d GPUs: in preload mode a container can have %d: name fewer in ALIYUN_COM_GPU_VISIBLE_DEVICES, %s",
			gpus, page.MaxVGPUs, toGuard)
	}
	return nil
}

// giveLimiter decides whether the container gets the preload library, and its page with it. library is what is installed.
func giveLimiter(p *spec.Plan, q *quota.Quota, own spec.Own, library string) error {
	var why error
	switch {
	case p.Page == "":
		return nil // GivePage has decided
	case own.ReadOnly != "":
		why = fmt.Errorf("admit: mount %s is read-only, and %s cannot be put into it: mount it read-write, or not there", own.ReadOnly, page.Path)
		p.Page = ""
	case q.NoLimiter:
		why = errors.New("admit: CGPU_LIMITER=off: in preload mode nothing else enforces the quota: leave it out")
	case library == "":
		why = errors.New("admit: libcgpu.so is not installed, and in preload mode nothing else enforces the quota: " +
			"put it beside cgpu-runtime or into ../lib/cgpu")
	default:
		p.Limiter = library
	}
	if p.PageWritable && why != nil {
		return fmt.Errorf("%w, %s", why, toGuard)
	}
	return nil
}

// limiter fills the limiter into a plan.
func (a *Ask) limiter(p *spec.Plan) error {
	own, err := a.Doc.Own()
	if err != nil {
		return err
	}
	library := device.Limiter()
	if p.PageWritable && library != "" {
		library = page.LimiterFile(p.Page) // a copy: launch.MakePage
	}
	return giveLimiter(p, a.Quota, own, library)
}
