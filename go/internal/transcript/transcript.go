// Package transcript runs tests written as text: each command is followed by the machine's actions, indented.
// Lines that begin with # are comments. After a change of behavior run go test ./PACKAGE -update, and review
// the difference.
package transcript

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "write what the machine does into the transcripts")

// Test runs each file of testdata. For each file, begin returns a function that runs a command, given as
// words, and returns the resulting actions, one per line.
func Test(t *testing.T, begin func(t *testing.T) func(words []string) []string) {
	paths, err := filepath.Glob("testdata/*.txt")
	require.NoError(t, err)
	require.NotEmpty(t, paths)
	for _, path := range paths {
		t.Run(strings.TrimSuffix(filepath.Base(path), ".txt"), func(t *testing.T) {
			want, err := os.ReadFile(path)
			require.NoError(t, err)
			got := play(string(want), begin(t))
			if *update {
				require.NoError(t, os.WriteFile(path, []byte(got), 0o644))
				return
			}
			require.Equal(t, string(want), got)
		})
	}
}

// play returns the text with the machine's present answers.
func play(text string, run func(words []string) []string) string {
	var out strings.Builder
	for line := range strings.Lines(text) {
		switch command := strings.TrimRight(line, "\n"); {
		case strings.HasPrefix(line, " "): // an earlier answer
		case command == "" || strings.HasPrefix(command, "#"):
			out.WriteString(line)
		default:
			out.WriteString(line)
			for _, answer := range run(strings.Fields(command)) {
				fmt.Fprintf(&out, "  %s\n", answer)
			}
		}
	}
	return out.String()
}

// Option returns the value of name=value among the words of a command, empty if there is none.
func Option(words []string, name string) string {
	for _, w := range words {
		if value, ok := strings.CutPrefix(w, name+"="); ok {
			return value
		}
	}
	return ""
}

// Number parses a whole number; an empty text is 0.
func Number(t *testing.T, s string) int64 {
	t.Helper()
	if s == "" {
		return 0
	}
	n, err := strconv.ParseInt(s, 10, 64)
	require.NoError(t, err)
	return n
}

// Duration parses a duration such as 200ms.
func Duration(t *testing.T, s string) time.Duration {
	t.Helper()
	d, err := time.ParseDuration(s)
	require.NoError(t, err)
	return d
}
