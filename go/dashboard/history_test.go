package dashboard

import (
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var start = time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)

func TestEventsAreNumberedAndTheOldestAreForgotten(t *testing.T) {
	var h History
	assert.Empty(t, h.After(0))
	for i := range 3 * mostEvents / 2 {
		e := h.Add(Event{Kind: QuorumChanged, Step: int64(i)})
		assert.EqualValues(t, i+1, e.ID)
	}
	all := h.After(0)
	assert.Len(t, all, mostEvents)
	for i, e := range all {
		assert.EqualValues(t, mostEvents/2+1+i, e.ID)
		assert.Equal(t, e.ID-1, e.Step)
	}
	assert.Len(t, h.After(3*mostEvents/2-2), 2)
	assert.Empty(t, h.After(3*mostEvents/2))
	assert.Equal(t, all, h.After(1e9),
		"an id above all existing ones is from an earlier process: all events are new")
}

func TestAnEventIsBounded(t *testing.T) {
	var h History
	many := make([]string, 10_000)
	for i := range many {
		many[i] = fmt.Sprint("g", i)
	}
	e := h.Add(Event{Left: many, Joined: many[:3], Reason: strings.Repeat("x", 1e6)})
	assert.Equal(t, []string{"g0", "g1", "g2", "g3", "g4", "g5", "g6", "g7", "and 9992 more"}, e.Left)
	assert.Equal(t, many[:3], e.Joined)
	assert.LessOrEqual(t, len(e.Reason), longestReason+3)
}

func TestTheThroughputOfAMonthStaysBoundedAndCoversAllOfIt(t *testing.T) {
	var h History
	const rounds = 200_000
	for i := range rounds {
		h.Round(int64(i), 4, start.Add(time.Duration(i)*10*time.Second))
	}
	points := h.Points()
	assert.LessOrEqual(t, len(points), mostPoints)
	assert.GreaterOrEqual(t, len(points), mostPoints/3)
	assert.Equal(t, start.UnixMilli(), points[0].At)
	last := points[len(points)-1]
	assert.Less(t, rounds-last.Step, int64(rounds/100))
	for i := 1; i < len(points); i++ {
		assert.Greater(t, points[i].At, points[i-1].At)
	}
}

func TestAPointASecondAndOneForEachChangeOfTheMembers(t *testing.T) {
	var h History
	for i := range 100 {
		groups := 4
		if i == 50 {
			groups = 3
		}
		h.Round(int64(i), groups, start.Add(time.Duration(i)*100*time.Millisecond))
	}
	var steps []int64
	for _, p := range h.Points() {
		steps = append(steps, p.Step)
	}
	assert.Equal(t, []int64{0, 10, 20, 30, 40, 50, 51, 61, 71, 81, 91}, steps)
}

// Each change of the number of groups adds a point. A job with many changes must still show its steps between
// them.
func TestManyChangesOfTheGroupsDoNotHideTheSteps(t *testing.T) {
	var h History
	now := start
	for i := range 10 * mostPoints {
		now = now.Add(2 * time.Second)
		h.Round(int64(i), 1+i%2, now)
	}
	steady := now
	for i := range 3600 {
		now = now.Add(time.Second)
		h.Round(int64(i), 1, now)
	}
	points := slices.DeleteFunc(h.Points(), func(p Point) bool { return p.At <= steady.UnixMilli() })
	assert.Greater(t, len(points), 10)
}

func TestAStateOfALaterStepIsNoThroughput(t *testing.T) {
	var h History
	// a group with a checkpoint joins, and later a commit fails
	steps := []int64{0, 1, 5000, 5001, 5001, 5002}
	for i, step := range steps {
		h.Round(step, 2, start.Add(time.Duration(i)*time.Second))
	}
	var trained []int64
	for _, p := range h.Points() {
		trained = append(trained, p.Trained)
	}
	assert.Equal(t, []int64{0, 1, 1, 2, 2, 3}, trained)
}

// A quorum that stands has a report for many steps. The round that follows it counts none of them again.
func TestTheStepsOfAQuorumThatStandsCount(t *testing.T) {
	var h History
	h.Advanced(900, 2, start) // an earlier lighthouse has seen these steps
	h.Round(901, 2, start.Add(time.Second))
	h.Advanced(941, 2, start.Add(2*time.Second))
	h.Advanced(950, 2, start.Add(3*time.Second))
	h.Round(950, 3, start.Add(3*time.Second))
	h.Round(951, 3, start.Add(4*time.Second))
	assert.Equal(t, int64(51), h.latest.Trained)
}

func TestEachKindOfEventIsDescribedAndHasItsWords(t *testing.T) {
	kinds := constants(t, "history.go", "Kind")
	read := func(path string) string {
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		return string(text)
	}
	var described struct {
		Components struct {
			Schemas struct {
				Event struct {
					Properties struct{ Kind struct{ Enum []string } }
				}
				Status struct {
					Properties struct{ Notices struct{ Description string } }
				}
			}
		}
	}
	require.NoError(t, json.Unmarshal([]byte(read("openapi.json")), &described))
	schemas := described.Components.Schemas
	assert.ElementsMatch(t, kinds, schemas.Event.Properties.Kind.Enum, "openapi.json, the schema Event")
	for _, kind := range notices {
		assert.Contains(t, schemas.Status.Properties.Notices.Description, string(kind),
			"openapi.json, notices in the schema Status")
	}
	for _, place := range []struct{ path, begin, end string }{
		{"web/app.js", "const EVENT_COLORS", "\n}"},
		{"web/app.js", "const OF_MEMBERS", "\nlet "},
		{"../../torchft/cli/events.py", "_OF_MEMBERS = ", "\n\n\ndef _line"},
	} {
		_, rest, found := strings.Cut(read(place.path), place.begin)
		require.True(t, found, "%s has no %s", place.path, place.begin)
		part, _, found := strings.Cut(rest, place.end)
		require.True(t, found, "%s has no %q after %s", place.path, place.end, place.begin)
		for _, kind := range kinds {
			assert.Regexp(t, `\b`+regexp.QuoteMeta(kind)+`\b`, part, "%s, %s", place.path, place.begin)
		}
	}
}
