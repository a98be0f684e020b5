// SPDX-License-Identifier: Apache-2.0

package spec

import (
	"encoding/json"
	"fmt"
	"path"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/opencgpu/cgpu/pkg/alloc"
)

// TakeShares takes the hooks that are shares of GPUs (package alloc) out of the document, wherever among its hooks they are,
// and returns the shares. taken counts the hooks. After an error all of them are out too, but for those of a list of hooks
// that cannot be read.
//
// A hook that is left would run under the low-level runtime, and refuse the start.
func (d *Document) TakeShares() (shares []alloc.Share, taken int, err error) {
	hooks, err := d.within("hooks")
	if hooks == nil || err != nil {
		return nil, 0, err
	}
	var errs []error
	for i := range hooks.members {
		m := &hooks.members[i]
		if string(m.value) == "null" {
			continue
		}
		list, err := elements(m.value)
		if err != nil {
			errs = append(errs, fmt.Errorf("spec: hooks.%s: %w", m.key, err))
			continue
		}
		var kept [][]byte
		for _, raw := range list {
			var h specs.Hook
			// What no hook is, the low-level runtime refuses.
			if json.Unmarshal(raw, &h) != nil || path.Base(h.Path) != "cgpu-hook" {
				kept = append(kept, raw)
				continue
			}
			share, ours, err := alloc.FromHookArgs(h.Args)
			switch {
			case !ours:
				kept = append(kept, raw)
			case err != nil:
				errs = append(errs, err)
			default:
				shares = append(shares, share)
			}
		}
		if len(kept) < len(list) {
			taken += len(list) - len(kept)
			m.value, m.child = array(kept), nil
		}
	}
	if len(errs) > 0 {
		return nil, taken, errs[0] // one line
	}
	return shares, taken, nil
}
