package name

import (
	"os"
	"path/filepath"
	"testing"
)

// Docker's names, and what must not be read, are tested in cmd/cgpu (TestDockerName).
func TestAnnotated(t *testing.T) {
	for text, want := range map[string]string{
		`{"annotations":{"io.kubernetes.pod.name":"train-0","io.kubernetes.container.name":"main","io.kubernetes.pod.namespace":"ml"}}`: "ml/train-0/main",
		`{"annotations":{"io.kubernetes.container.name":"main"}}`:                                                                       "",
		`{"annotations":{"nerdctl/name":"web"}}`:                                                                                        "web",
		`{}`:                                                                                                                            "",
		`{"`:                                                                                                                            "",
	} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := Of(dir, "abcdef"); got != want {
			t.Errorf("%s: %q, want %q", text, got, want)
		}
	}
	if got := Of("relative", "abcdef"); got != "" {
		t.Error(got)
	}
}
