package main

import (
	"errors"
	"fmt"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/name"
	"github.com/opencgpu/cgpu/pkg/snapshot"
)

// maxName bounds a name.
const maxName = name.MaxLength

// findContainer finds a container as ledger.Find does, and by the engine's name. A name that is also the beginning of another
// container's ID means neither: whoever chooses a name must not get a command that was meant for another.
func findContainer(book *ledger.Ledger, container string) (ledger.Record, error) {
	found, err := book.Find(container)
	if err != nil && !errors.Is(err, ledger.ErrNotFound) || err == nil && found.ID == container {
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
		if (err != nil || r.ID != found.ID) && r.Name == "" && name.Of(r.Bundle, r.ID) == container {
			fits = append(fits, snapshot.Named(r))
		}
	}
	switch len(fits) {
	case 0:
		return ledger.Record{}, err
	case 1:
		return fits[0], nil
	}
	return ledger.Record{}, fmt.Errorf("container %q: may be %s%s or %s%s: give the beginning of an ID that only one has", container,
		shortID(fits[0].ID), label(fits[0]), shortID(fits[1].ID), label(fits[1]))
}
