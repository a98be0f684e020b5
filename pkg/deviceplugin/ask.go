// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"

	"github.com/opencgpu/cgpu/pkg/wire"
)

// window is how much of an answer is on its way to its reader: the least that HTTP/2 has.
const window = 64 << 10

// ask calls a method of gRPC's that needs no argument, at a socket, and hands over the answer as it comes. gRPC's own client holds an
// answer whole before anything is read of it, and needs a bound of its size. A call of gRPC's with one answer is a POST of HTTP/2.
func ask(ctx context.Context, socket, method string, read func(*wire.Message) error) error {
	var protocols http.Protocols
	protocols.SetUnencryptedHTTP2(true)
	transport := &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		},
		Protocols: &protocols,
		HTTP2:     &http.HTTP2Config{MaxReceiveBufferPerStream: window, MaxReceiveBufferPerConnection: window},
		// Nothing but what gRPC compresses, and it is not asked to.
		DisableCompression: true,
	}
	defer transport.CloseIdleConnections()
	none := make([]byte, 5) // a message without a byte, not compressed
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://kubelet"+method, bytes.NewReader(none))
	if err != nil {
		return err
	}
	request.Header = http.Header{"Content-Type": {"application/grpc"}, "Te": {"trailers"}}
	answer, err := transport.RoundTrip(request)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	err = readAnswer(answer.Body, read)
	status, text := answer.Trailer.Get("Grpc-Status"), answer.Trailer.Get("Grpc-Message")
	if status == "" { // there is no answer but the status
		status, text = answer.Header.Get("Grpc-Status"), answer.Header.Get("Grpc-Message")
	}
	if status != "" && status != "0" {
		return fmt.Errorf("status %.8q of gRPC: %.253q", status, text)
	}
	if status == "" && answer.StatusCode != http.StatusOK {
		return fmt.Errorf("answers with HTTP's %.64q and without a status of gRPC", answer.Status)
	}
	if err == nil && status == "" {
		err = fmt.Errorf("%w: it has no status", wire.ErrFormat)
	}
	return err
}

// readAnswer reads the one message of an answer, and up to its end, where the status comes.
func readAnswer(body io.Reader, read func(*wire.Message) error) error {
	r := wire.NewReader(body)
	compressed, err := r.ReadByte()
	if err != nil {
		return fmt.Errorf("no answer: %w", err)
	}
	if compressed != 0 {
		return fmt.Errorf("%w: it is compressed", wire.ErrFormat)
	}
	message, err := wire.Frame(r)
	if err == nil {
		err = read(message)
	}
	if err != nil {
		return err
	}
	switch _, err = r.ReadByte(); {
	case errors.Is(err, io.EOF):
		return nil
	case err == nil:
		err = fmt.Errorf("%w: more than one message", wire.ErrFormat)
	}
	return err
}
