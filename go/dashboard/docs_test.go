package dashboard

import (
	"encoding/json"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// names of all metrics, those of a histogram with its suffixes.
func metricNames(t *testing.T) []string {
	families, err := registry(func() []*Feed { return []*Feed{NewFeed("default", (&job{}).say)} }).Gather()
	require.NoError(t, err)
	var found []string
	for _, family := range families {
		name := family.GetName()
		found = append(found, name)
		if family.GetType().String() == "HISTOGRAM" {
			found = append(found, name+"_bucket", name+"_sum", name+"_count")
		}
	}
	return found
}

func TestWhatTheDocsAndTheGrafanaDashboardSpeakOfExists(t *testing.T) {
	known := metricNames(t)
	for _, path := range []string{"../../docs/grafana.json", "../../docs/operating.md"} {
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		if strings.HasSuffix(path, ".json") {
			require.True(t, json.Valid(text))
		}
		for _, name := range slices.Compact(slices.Sorted(slices.Values(regexp.MustCompile(`\b(torchft|process)_[a-z_]+`).FindAllString(string(text), -1)))) {
			if strings.HasSuffix(path, ".md") && !regexp.MustCompile("_(total|seconds|members|id|step|viewers)$").MatchString(name) {
				continue // a module or a command
			}
			assert.Contains(t, known, name, path)
		}
	}
	operating, err := os.ReadFile("../../docs/operating.md")
	require.NoError(t, err)
	for _, name := range known {
		if strings.HasPrefix(name, "torchft_") && !regexp.MustCompile("_(bucket|sum|count)$").MatchString(name) {
			assert.Contains(t, string(operating), name, "it is not documented")
		}
	}
}
