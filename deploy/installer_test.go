// SPDX-License-Identifier: Apache-2.0

package deploy

import (
	"encoding/base64"
	"errors"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	rbac "k8s.io/api/rbac/v1"
)

// installer is the DaemonSet cgpu-installer among objects; nil if it is not there.
func installer(list []object) *apps.DaemonSet {
	for _, set := range of[*apps.DaemonSet](list) {
		if set.Name == "cgpu-installer" {
			return set
		}
	}
	return nil
}

// TestInstaller: nobody gets it who did not ask for it; the component and the chart make the same; the container that has the host has
// no token, and the one that has a token has nothing of the host.
func TestInstaller(t *testing.T) {
	for dir, settings := range overlays {
		if installer(build(t, dir)) != nil || installer(render(t, settings...)) != nil {
			t.Errorf("%s: a privileged DaemonSet that nobody asked for", dir)
		}
	}
	for component, c := range map[string]struct {
		settings []string
		args     [][]string
	}{
		"installer": {nil, [][]string{{"install", "auto", "--host-root=/host"}, {"node-label", "set"}}},
		"uninstaller": {[]string{"installer.mode=uninstall"},
			[][]string{{"uninstall", "auto", "--host-root=/host"}, {"node-label", "remove"}}},
	} {
		t.Run(component, func(t *testing.T) {
			list := with(t, component)
			checkInstaller(t, list, c.args)
			want, got := comparable(list), comparable(render(t, append(c.settings, "installer.enabled=true")...))
			delete(want, "Namespace /cgpu-system")
			if diff := gocmp.Diff(want, got); diff != "" {
				t.Errorf("helm differs (-kustomize +helm):\n%s", diff)
			}
		})
	}
}

func checkInstaller(t *testing.T, list []object, args [][]string) {
	t.Helper()
	pod := installer(list).Spec.Template.Spec
	if pod.HostNetwork || pod.HostPID || pod.HostIPC || *pod.AutomountServiceAccountToken || pod.ServiceAccountName != "cgpu-installer" {
		t.Errorf("pod %+v", pod)
	}
	if !maps.Equal(pod.NodeSelector, map[string]string{"node-restriction.kubernetes.io/cgpu-install": "true"}) {
		t.Errorf("it works on nodes with %v", pod.NodeSelector)
	}
	host := map[string]string{} // volume to path
	for _, v := range pod.Volumes {
		if v.HostPath != nil {
			host[v.Name] = v.HostPath.Path
		}
	}
	var got [][]string
	for _, c := range slices.Concat(pod.InitContainers, pod.Containers) {
		got = append(got, c.Args)
		writable, token := []string{}, false
		for _, m := range c.VolumeMounts {
			path, ofHost := host[m.Name]
			token = token || !ofHost
			switch {
			case path == "/" && (m.MountPropagation == nil || *m.MountPropagation != core.MountPropagationHostToContainer ||
				m.RecursiveReadOnly != nil):
				t.Errorf("%s: %+v: it keeps what the host unmounts, or the API server refuses it", c.Name, m)
			case ofHost && m.MountPath != strings.TrimSuffix("/host"+path, "/"):
				t.Errorf("%s: %s of the host is at %s", c.Name, path, m.MountPath)
			case ofHost && !m.ReadOnly:
				writable = append(writable, path)
			}
		}
		privileged := *c.SecurityContext.Privileged
		want := []string{}
		if privileged {
			want = []string{"/opt/cgpu", "/etc", "/run/cgpu", "/dev"}
		}
		if !slices.Equal(writable, want) || token == privileged || c.SecurityContext.ReadOnlyRootFilesystem == nil ||
			c.Resources.Limits.Memory().IsZero() {
			t.Errorf("%s: privileged %v, writes %q, token %v", c.Name, privileged, writable, token)
		}
		if s := c.SecurityContext; !privileged && (!*s.RunAsNonRoot || *s.AllowPrivilegeEscalation ||
			!slices.Equal(s.Capabilities.Drop, []core.Capability{"ALL"})) {
			t.Errorf("%s: %+v", c.Name, s)
		}
	}
	if diff := gocmp.Diff(args, got); diff != "" {
		t.Errorf("arguments (-want +got):\n%s", diff)
	}
	for _, r := range of[*rbac.ClusterRole](list) {
		if r.Name == "cgpu-installer" && (len(r.Rules) != 1 || !slices.Equal(r.Rules[0].Resources, []string{"nodes"}) ||
			!slices.Equal(r.Rules[0].Verbs, []string{"patch"})) {
			t.Errorf("rights %+v", r.Rules)
		}
	}
	if !hasPolicy(list, "installer.cgpu.io") {
		t.Error("nothing keeps it to its own node")
	}
}

// TestInstallerValues: each value reaches what it is for, and what would be unsafe is refused.
func TestInstallerValues(t *testing.T) {
	set := installer(render(t, "installer.enabled=true", "installer.engine=k3s", "installer.restart=true", "installer.dir=/var/lib/cgpu",
		"runtimeClass.handler=gpu",
		"installer.engineSocket=/run/x.sock", "installer.image.repository=registry.example/cgpu-installer",
		"installer.image.tag=v1", "image.tag=v2"))
	c := set.Spec.Template.Spec.InitContainers[0]
	want := []string{"install", "k3s", "--host-root=/host", "--host-dir=/var/lib/cgpu", "--name=gpu",
		"--engine-socket=/run/x.sock", "--restart"}
	if !slices.Equal(c.Args, want) || c.Image != "registry.example/cgpu-installer:v1" ||
		set.Spec.Template.Spec.Containers[0].Image != "cgpu-agent:v2" {
		t.Errorf("image %s, arguments %q, want %q", c.Image, c.Args, want)
	}
	for _, path := range []string{"/host/var/lib/cgpu", "/host/var/lib/rancher/k3s/agent/etc/containerd"} {
		if !slices.ContainsFunc(c.VolumeMounts, func(m core.VolumeMount) bool { return m.MountPath == path && !m.ReadOnly }) {
			t.Errorf("%s cannot be written: %+v", path, c.VolumeMounts)
		}
	}
	for set, want := range map[string]string{
		"installer.enabled=true,admission.enabled=false": "keeps it to one label",
		"installer.engine=docker":                        "engine",
		"installer.mode=upgrade":                         "mode",
		"installer.dir=/":                                "dir",
		"installer.dir=/opt/../etc":                      "dir",
		"installer.default=true":                         "default",
	} {
		if out, err := helm.run(t, "template", "cgpu", "helm/cgpu", "--kube-version", kubeVersion, "--set", set); err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("--set %s: %v, want %q\n%s", set, err, want, out)
		}
	}
}

// TestInstallerNotes: the chart says which label to set, and not one that the installer sets or is to remove.
func TestInstallerNotes(t *testing.T) {
	const agents, installers = "kubectl label node NODE node-restriction.kubernetes.io/cgpu=true",
		"kubectl label node NODE node-restriction.kubernetes.io/cgpu-install=true"
	// Helm shows notes only where there is a cluster.
	chart := t.TempDir()
	if err := os.CopyFS(chart, os.DirFS("helm/cgpu")); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(chart+"/templates/NOTES.txt", chart+"/notes.txt"); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(chart+"/templates/notes.yaml", []byte(`notes: {{ tpl (.Files.Get "notes.txt") . | b64enc }}`), 0o600); err != nil {
		t.Fatal(err)
	}
	for settings, want := range map[string]string{
		"installer.enabled=false":                         agents,
		"installer.enabled=true":                          installers,
		"installer.enabled=true,nodeSelector.x=y":         "set those yourself",
		"installer.enabled=true,installer.mode=uninstall": "removes the label",
	} {
		out, err := helm.run(t, "template", "cgpu", chart, "--kube-version", kubeVersion, "--show-only",
			"templates/notes.yaml", "--set", settings)
		_, encoded, _ := strings.Cut(string(out), "notes: ")
		text, decoded := base64.StdEncoding.DecodeString(strings.TrimSpace(encoded))
		notes := string(text)
		if err := errors.Join(err, decoded); err != nil || !strings.Contains(notes, want) {
			t.Errorf("--set %s: %v, want %q\n%s", settings, err, want, notes)
		}
		for _, label := range []string{agents, installers} {
			if label != want && strings.Contains(notes, label+" ") && want != "set those yourself" {
				t.Errorf("--set %s: says %q", settings, label)
			}
		}
	}
}

// TestInstallerImage: what the image has is what a version on a node is made of.
func TestInstallerImage(t *testing.T) {
	text, err := os.ReadFile("image/installer.Containerfile")
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{
		"\nFROM scratch\nCOPY cgpu cgpu-guard cgpu-hook cgpu-podresources cgpu-probe cgpu-refresh cgpu-runtime cgpu-sim /cgpu/bin/\n",
		"\nCOPY libcgpu.so cgpu-load /cgpu/lib/cgpu/\n", "\nENTRYPOINT [\"/cgpu/bin/cgpu\"]\n",
	} {
		if !strings.Contains(string(text), line) {
			t.Errorf("want %q in\n%s", line, text)
		}
	}
}
