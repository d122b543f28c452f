package logging

import (
	"bufio"
	"bytes"
	"fmt"
	"log/slog"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/grpclog"

	"github.com/torchft/torchft/go/internal/testmain"
)

func TestMain(m *testing.M) { testmain.NoGoroutineIsLeft(m) }

func TestAReaderThatDoesNotReadBlocksNoWriter(t *testing.T) {
	reader, writer, err := os.Pipe()
	require.NoError(t, err)
	w := To(writer)
	log := slog.New(slog.NewTextHandler(w, nil))
	before := testutil.ToFloat64(Metric())
	const lines = 20_000 // each of some 200 bytes: together more than the pipe and the writer can buffer
	for i := range lines {
		log.Info("a line of the log", "number", i, "text", strings.Repeat("x", 120))
	}
	w.Flush(time.Millisecond) // returns after its timeout
	lost := testutil.ToFloat64(Metric()) - before
	assert.Positive(t, lost)

	// The written lines are complete and in order, and the dropped ones are counted.
	found, dropped := 0, 0
	text := bufio.NewScanner(reader)
	for found+dropped < lines && text.Scan() {
		if m := regexp.MustCompile(`lines of the log were dropped.* lines=(\d+)`).FindStringSubmatch(text.Text()); m != nil {
			n, err := strconv.Atoi(m[1])
			require.NoError(t, err)
			dropped += n
			continue
		}
		require.Contains(t, text.Text(), fmt.Sprintf("number=%d text=", found))
		found++
	}
	assert.Equal(t, lines, found+dropped)
	assert.InDelta(t, lost, dropped, 0)

	log.Info("the next one")
	require.True(t, text.Scan())
	assert.Contains(t, text.Text(), "the next one")
	w.Flush(time.Minute)
	require.NoError(t, writer.Close())
	require.NoError(t, reader.Close())
}

// The reader of standard error may end before this process: the lines are lost then, and nothing else.
func TestAReaderThatHasEndedEndsNoProcess(t *testing.T) {
	testmain.WithoutReader(t, func() {
		w := To(os.Stderr)
		GRPC(w)
		slog.New(slog.NewTextHandler(w, nil)).Info("a line without a reader")
		grpclog.Error("an error of gRPC without a reader")
		w.Flush(time.Minute)
	})
}

func TestFlushWaitsForTheLastLine(t *testing.T) {
	var out bytes.Buffer
	w := To(&out)
	slog.New(slog.NewTextHandler(w, nil)).Info("the last line")
	w.Flush(time.Minute)
	assert.Contains(t, out.String(), "the last line")
	w.Flush(time.Minute) // nothing is left to wait for
}
