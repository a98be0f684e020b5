// SPDX-License-Identifier: Apache-2.0

package node

import (
	"errors"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/name"
	"github.com/opencgpu/cgpu/pkg/snapshot"
)

// FindContainer finds a container as ledger.Find does, and by the engine's name. A name that is also the beginning of another
// container's ID means neither: whoever chooses a name must not get a command that was meant for another.
func FindContainer(book *ledger.Ledger, container string) (ledger.Record, error) {
	found, err := book.Find(container)
	if err != nil && !errors.Is(err, ledger.ErrNotFound) || err == nil && found.IsCalled(container) {
		return snapshot.Named(found), err
	}
	records, lerr := book.List()
	if lerr != nil {
		return ledger.Record{}, lerr
	}
	fits := []ledger.Record{}
	if err == nil {
		fits = append(fits, snapshot.Named(found))
	}
	for _, r := range records {
		if (err != nil || r.Nonce != found.Nonce) && r.Name == "" && name.Of(r.Bundle, r.ID) == container {
			fits = append(fits, snapshot.Named(r))
		}
	}
	switch len(fits) {
	case 0:
		return ledger.Record{}, err
	case 1:
		return fits[0], nil
	}
	return ledger.Record{}, ledger.Ambiguous(container, fits)
}
