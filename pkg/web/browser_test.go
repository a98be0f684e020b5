// SPDX-License-Identifier: Apache-2.0

package web

import (
	"bufio"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/snapshot"
	"github.com/opencgpu/cgpu/pkg/testenv"
)

// browser is a headless Chromium, which is spoken to by its DevTools protocol over two pipes.
type browser struct {
	t       *testing.T
	in      *os.File
	session string // of its one page
	mu      sync.Mutex
	last    int
	answers map[int]chan message
	faults  []string // what the console tells of
}

type message struct {
	ID      int             `json:"id"`
	Session string          `json:"sessionId,omitempty"`
	Method  string          `json:"method"`
	Params  json.RawMessage `json:"params"`
	Result  json.RawMessage `json:"result,omitempty"`
	Error   *struct {
		Message string `json:"message"`
	} `json:"error,omitempty"`
}

// startBrowser skips the test where there is no Chromium: `make setup` installs it in CI.
func startBrowser(t *testing.T) *browser {
	t.Helper()
	path := testenv.NeedsProgram(t, "chromium")
	hears, in, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	out, says, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	profile, err := os.MkdirTemp("", "cgpu-chromium") // not t.TempDir: what the browser leaves behind may still write there
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(path, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
		"--disable-background-networking",
		"--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe",
		"--user-data-dir="+profile)
	cmd.ExtraFiles = []*os.File{hears, says}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	hears.Close()
	says.Close()
	b := &browser{t: t, in: in, answers: map[int]chan message{}}
	go b.read(out)
	t.Cleanup(func() {
		b.t, b.session = t, ""
		b.call("Browser.close", nil, nil)
		_ = cmd.Wait()
		_ = os.RemoveAll(profile)
	})
	var target struct{ TargetID, SessionID string }
	b.call("Target.createTarget", map[string]any{"url": "about:blank"}, &target)
	b.call("Target.attachToTarget", map[string]any{"targetId": target.TargetID, "flatten": true}, &target)
	b.session = target.SessionID
	for _, domain := range []string{"Page", "Runtime", "Log"} {
		b.call(domain+".enable", nil, nil)
	}
	return b
}

// read takes what the browser says: answers, and faults of the page.
func (b *browser) read(out *os.File) {
	r := bufio.NewReader(out)
	for {
		text, err := r.ReadBytes(0)
		var m message
		if err == nil {
			err = json.Unmarshal(text[:len(text)-1], &m)
		}
		b.mu.Lock()
		switch {
		case err != nil:
			for _, c := range b.answers {
				close(c)
			}
			b.answers = nil
			b.mu.Unlock()
			return
		case m.ID != 0 && b.answers[m.ID] != nil:
			b.answers[m.ID] <- m
			delete(b.answers, m.ID)
		case m.Method == "Runtime.exceptionThrown", m.Method == "Runtime.consoleAPICalled", m.Method == "Log.entryAdded":
			b.faults = append(b.faults, string(m.Params))
		}
		b.mu.Unlock()
	}
}

func (b *browser) call(method string, params, result any) {
	b.t.Helper()
	text, err := json.Marshal(params)
	if err != nil {
		b.t.Fatal(err)
	}
	if params == nil {
		text = []byte("{}")
	}
	answer := make(chan message, 1)
	b.mu.Lock()
	if b.answers == nil {
		b.mu.Unlock()
		b.t.Fatal(method, ": the browser has ended")
	}
	b.last++
	m := message{ID: b.last, Session: b.session, Method: method, Params: text}
	b.answers[m.ID] = answer
	b.mu.Unlock()
	if text, err = json.Marshal(m); err != nil {
		b.t.Fatal(err)
	}
	if _, err := b.in.Write(append(text, 0)); err != nil {
		b.t.Fatal(err)
	}
	select {
	case m, ok := <-answer:
		if method == "Browser.close" {
			return
		}
		if !ok || m.Error != nil {
			b.t.Fatalf("%s: %+v", method, m.Error)
		}
		if result != nil {
			if err := json.Unmarshal(m.Result, result); err != nil {
				b.t.Fatal(err)
			}
		}
	case <-time.After(2 * time.Minute):
		b.t.Fatal(method, ": no answer")
	}
}

// eval evaluates an expression of JavaScript, which may be a promise.
func eval[T any](b *browser, expression string) (value T) {
	b.t.Helper()
	var got struct {
		Result struct {
			Value json.RawMessage `json:"value"`
		} `json:"result"`
		ExceptionDetails json.RawMessage `json:"exceptionDetails"`
	}
	b.call("Runtime.evaluate", map[string]any{"expression": expression, "returnByValue": true, "awaitPromise": true}, &got)
	if got.ExceptionDetails != nil {
		b.t.Fatalf("%s: %s", expression, got.ExceptionDetails)
	}
	if got.Result.Value != nil {
		if err := json.Unmarshal(got.Result.Value, &value); err != nil {
			b.t.Fatalf("%s: %v", expression, err)
		}
	}
	return value
}

// until waits for an expression to be true.
func (b *browser) until(expression string) {
	b.t.Helper()
	for range 3000 {
		if eval[bool](b, expression) {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
	b.t.Fatalf("waited in vain for %s; the page says %q, its faults are %q", expression, eval[string](b, "document.body.innerText"), b.faults)
}

// open shows the page at a width.
func (b *browser) open(url string, width int, scheme string) {
	b.t.Helper()
	b.resize(width, scheme)
	b.call("Page.navigate", map[string]any{"url": url}, nil)
	b.until(`document.readyState === "complete" && document.body.className === "is-live" && document.querySelectorAll("section").length === 2 && location.href === ` + fmt.Sprintf("%q", url))
}

func (b *browser) resize(width int, scheme string) {
	b.t.Helper()
	b.call("Emulation.setDeviceMetricsOverride", map[string]any{"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": false}, nil)
	b.call("Emulation.setEmulatedMedia", map[string]any{"features": []any{map[string]any{"name": "prefers-color-scheme", "value": scheme}}},
		nil)
}

// shot writes a picture of the page, for people, to the folder in CGPU_TEST_SHOTS.
func (b *browser) shot(name string) {
	b.t.Helper()
	folder := os.Getenv("CGPU_TEST_SHOTS")
	if folder == "" {
		return
	}
	var picture struct{ Data string }
	b.call("Page.captureScreenshot", map[string]any{"format": "png", "captureBeyondViewport": true}, &picture)
	data, err := base64.StdEncoding.DecodeString(picture.Data)
	if err != nil {
		b.t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(folder, name+".png"), data, 0o644); err != nil {
		b.t.Fatal(err)
	}
}

// audit looks for what keeps somebody from reading the page: text too faint, beyond the window's edge or cut; levels of headings left out;
// the same id twice; a curve without words.
const audit = `((width) => {
  const faults = [];
  const rgb = (text) => text.match(/[\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => (c /= 255) <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4).reduce((s, c, i) => s + c * [.2126, .7152, .0722][i], 0);
  const paper = (node) => {
    for (; node; node = node.parentElement) {
      const c = rgb(getComputedStyle(node).backgroundColor);
      if (c.length < 4 || c[3] > 0) return c;
    }
    return [255, 255, 255];
  };
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let n; n = texts.nextNode();) {
    const e = n.parentElement, box = e.getBoundingClientRect();
    if (!n.data.trim() || !e.checkVisibility() || e.closest(".unseen, thead, .skip, option")) continue;
    const a = light(rgb(getComputedStyle(e).color)), b = light(paper(e));
    const contrast = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    if (contrast < 4.5) faults.push("contrast " + contrast.toFixed(2) + " of " + n.data.trim().slice(0, 40));
    if (box.left < 0 || box.right > width + 1) faults.push("beyond the edge: " + n.data.trim().slice(0, 40));
    if (e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).display !== "inline") faults.push("cut: " + n.data.trim().slice(0, 40));
  }
  if (document.documentElement.scrollWidth > width) faults.push("wider than the window: " + document.documentElement.scrollWidth);
  let level = 0;
  for (const h of document.querySelectorAll("h1,h2,h3,h4,h5,h6")) {
    if (+h.tagName[1] > level + 1) faults.push("heading " + h.textContent);
    level = +h.tagName[1];
  }
  const ids = [...document.querySelectorAll("[id]")].map((e) => e.id);
  if (new Set(ids).size !== ids.length) faults.push("ids " + ids);
  for (const svg of document.querySelectorAll("svg")) if (!svg.getAttribute("aria-label")) faults.push("a curve without words");
  for (const t of document.querySelectorAll("table")) if (!t.caption.textContent || [...t.querySelectorAll("th")].some((th) => !th.scope)) faults.push("a table without names");
  return faults;
})`

// TestPage: at three widths, in light and dark, with nobody, one and 64 containers, and with hostile names, the page can be read, and the
// console is quiet.
func TestPage(t *testing.T) {
	b := startBrowser(t)
	hostile := func(at time.Duration) snapshot.View {
		v := nodeOf(len(evil)*2, at)
		for i := range v.GPUs {
			v.GPUs[i].Name = evil[6]
			for j := range v.GPUs[i].VGPUs {
				v.GPUs[i].VGPUs[j].Name, v.GPUs[i].VGPUs[j].ID = evil[j], evil[(j+6)%len(evil)]
			}
		}
		return v
	}
	for _, x := range []struct {
		name string
		n    int
		look func(time.Duration) snapshot.View
	}{
		{"0", 0, nil}, {"1", 1, nil}, {"64", 64, nil}, {"hostile", 2 * len(evil), hostile},
	} {
		t.Run(x.name, func(t *testing.T) {
			b.t = t
			if x.look == nil {
				x.look = func(at time.Duration) snapshot.View { return nodeOf(x.n, at) }
			}
			s := httptest.NewServer(hourLater(x.look))
			defer s.Close()
			defer s.CloseClientConnections()
			b.open(s.URL+"/", 1440, "light")
			b.until(fmt.Sprintf(`document.querySelectorAll("tbody tr").length === %d`, x.n))
			if x.n > 0 {
				b.until(`document.querySelectorAll("td svg .first").length > 0 && document.querySelector("td svg .first").getAttribute("d").length > 100`)
			}
			for _, width := range []int{360, 768, 1440} {
				for _, scheme := range []string{"light", "dark"} {
					b.resize(width, scheme)
					if faults := eval[[]string](b, fmt.Sprintf("%s(%d)", audit, width)); len(faults) > 0 {
						t.Errorf("%d, %s: %s", width, scheme, strings.Join(slices.Compact(faults[:min(len(faults), 12)]), "; "))
					}
					b.shot(fmt.Sprintf("%s-%d-%s", x.name, width, scheme))
				}
			}
			if x.name == "hostile" {
				notObeyed(t, b)
			}
			b.call("Page.navigate", map[string]any{"url": "about:blank"}, nil)
			b.mu.Lock()
			defer b.mu.Unlock()
			if len(b.faults) > 0 {
				t.Errorf("the console has %s", b.faults)
			}
		})
	}
}

// notObeyed: names are text, and change nothing.
func notObeyed(t *testing.T, b *browser) {
	t.Helper()
	if got := eval[string](b, `document.title`); got != "cgpu: GPUs of gpu1" {
		t.Errorf("title %q", got)
	}
	if n := eval[int](b, `document.querySelectorAll("main img, main script, main a, main b:not([data-is])").length`); n != 0 {
		t.Errorf("%d elements made of names", n)
	}
	names := eval[[]string](b, `[...document.querySelectorAll("section:first-of-type tbody th bdi:first-child")].map((e) => e.textContent)`)
	for i, want := range []string{evil[0], evil[1], "?[2Ja?b?c?", "?gnp.exe"} {
		if i >= len(names) || names[i] != want {
			t.Errorf("name %d of %q, want %q", i, names, want)
		}
	}
}

// TestPageLives: what a visitor and the node do. He has a keyboard and, perhaps, a screen reader.
func TestPageLives(t *testing.T) {
	b := startBrowser(t)
	p := hourLater(func(at time.Duration) snapshot.View { return nodeOf(4, at) })
	s := httptest.NewServer(p)
	defer s.Close()
	b.open(s.URL+"/", 1024, "light")
	b.until(`document.querySelectorAll("tbody tr").length === 4`)

	// All of the hour is in the curves, and is told.
	b.until(`document.querySelector(".chart svg .first").getAttribute("d").startsWith("M") && document.querySelector("[data-is=since]").textContent === "60 min ago"`)
	if got := eval[string](b, `document.querySelector("td svg").getAttribute("aria-label")`); !strings.HasPrefix(got,
		"GPU time in the last 60 min: average ") {
		t.Errorf("a curve is called %q", got)
	}

	var tree struct {
		Nodes []struct {
			Ignored    bool
			Role, Name struct{ Value any }
		}
	}
	b.call("Accessibility.getFullAXTree", nil, &tree)
	found := map[string]int{}
	for _, n := range tree.Nodes {
		if role, _ := n.Role.Value.(string); !n.Ignored {
			found[role]++
			name, _ := n.Name.Value.(string)
			if slices.Contains([]string{"searchbox", "combobox", "button", "table", "image", "link", "heading", "columnheader", "region"}, role) &&
				name == "" {
				t.Errorf("a %s without a name", role)
			}
		}
	}
	for role, least := range map[string]int{"main": 1, "banner": 1, "contentinfo": 1, "search": 1, "table": 2, "row": 6, "rowheader": 4,
		"columnheader": 12, "heading": 3, "searchbox": 1, "combobox": 1, "button": 1, "status": 2} {
		if found[role] < least {
			t.Errorf("%d of role %s, want %d: %v", found[role], role, least, found)
		}
	}

	var order []string
	for range 4 {
		b.key("Tab", 9)
		order = append(order, eval[string](b, `document.activeElement.id || document.activeElement.textContent`))
	}
	if want := []string{"Skip to the GPUs", "find", "sort", "pause"}; !slices.Equal(order, want) {
		t.Errorf("tab order %q, want %q", order, want)
	}
	b.key(" ", 32)
	b.until(`document.getElementById("pause").getAttribute("aria-pressed") === "true" && document.getElementById("status").textContent === "Paused"`)
	b.key(" ", 32)
	b.until(`document.getElementById("status").textContent === "Live"`)

	b.call("Runtime.evaluate", map[string]any{"expression": `document.getElementById("find").focus()`}, nil)
	b.call("Input.insertText", map[string]any{"text": "JOB-3"}, nil)
	b.until(`document.querySelectorAll("tbody tr").length === 1`)
	eval[any](b,
		`(() => { const f = document.getElementById("find"); f.value = ""; f.dispatchEvent(new Event("input")); const s = document.getElementById("sort"); s.value = "used"; s.dispatchEvent(new Event("change")); })()`)
	b.until(`[...document.querySelectorAll("tbody th bdi:first-child")].map((e) => e.textContent).join() === "job-2,job-0,job-1,job-3"`)

	// One more container, and one less; only these are told.
	v := nodeOf(5, time.Hour)
	v.GPUs[1].VGPUs = v.GPUs[1].VGPUs[1:]
	p.add(time.Now(), v, nil)
	b.until(`document.getElementById("news").textContent === "job-4 on GPU 0 came; job-1 on GPU 1 ended"`)
	p.add(time.Now(), snapshot.View{}, os.ErrPermission)
	b.until(`!document.getElementById("trouble").hidden && document.getElementById("trouble").textContent.includes("permission denied")`)
	p.add(time.Now(), v, nil)
	b.until(`document.getElementById("trouble").hidden`)
	s.CloseClientConnections()
	s.Listener.Close()
	b.until(`document.getElementById("status").textContent === "Connection lost, trying again"`)
}

func (b *browser) key(key string, code int) {
	b.t.Helper()
	down := map[string]any{"type": "keyDown", "key": key, "windowsVirtualKeyCode": code}
	if len(key) == 1 {
		down["text"] = key
	}
	b.call("Input.dispatchKeyEvent", down, nil)
	b.call("Input.dispatchKeyEvent", map[string]any{"type": "keyUp", "key": key, "windowsVirtualKeyCode": code}, nil)
}

// TestPicture takes docs/images/web.png of the page in CGPU_TEST_PAGE; hack/svg/web.sh has one.
func TestPicture(t *testing.T) {
	url := os.Getenv("CGPU_TEST_PAGE")
	if url == "" {
		testenv.Skip(t, "no test: takes the picture of the docs, for hack/svg/web.sh")
	}
	b := startBrowser(t)
	b.open(url, 960, "light")
	b.until(`document.querySelectorAll("tbody tr").length === 4 && document.querySelector("td svg .first").getAttribute("d").length > 100`)
	b.shot("web")
}
