// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/ledger"
)

// TestNames: a name is looked up once in a while, also one that there is not; the ledger's is taken at once, and one of a container that is
// gone is forgotten.
func TestNames(t *testing.T) {
	bundle := t.TempDir()
	call := func(name string) {
		t.Helper()
		text := `{"annotations":{"io.kubernetes.pod.namespace":"ml","io.kubernetes.pod.name":"train",` +
			`"io.kubernetes.container.name":"` + name + `"}}`
		if err := os.WriteFile(filepath.Join(bundle, "config.json"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	n, now := new(Names), time.Now()
	look := func(after time.Duration, want ...string) {
		t.Helper()
		records := []ledger.Record{{ID: "a", Nonce: "1", Bundle: bundle}, {ID: "b", Nonce: "2", Bundle: bundle, Name: "own"}}
		n.give(records, now.Add(after))
		for i, r := range records {
			if r.Name != want[i] {
				t.Errorf("after %v container %s is called %q, want %q", after, r.ID, r.Name, want[i])
			}
		}
	}
	look(0, "", "own")
	call("first")
	look(nameTime-1, "", "own")
	look(nameTime, "ml/train/first", "own")
	call("second")
	look(2*nameTime-1, "ml/train/first", "own")
	n.give(nil, now.Add(nameTime))
	look(nameTime, "ml/train/second", "own")
	if len(n.all) != 1 {
		t.Errorf("kept: %v", n.all)
	}
}
