package round

import (
	"reflect"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/torchft/torchft/go/quorum"
)

// notMerged has the fields of a request that are not part of the group's record, and why.
var notMerged = map[string]string{
	"GroupRank":          "the rank that asks",
	"CheckpointMetadata": "kept for each rank, and sent to ranks that heal from it",
	"InitSync":           "an argument of recovery",
	"GroupWorldSize":     "compared with that of the group",
	"Drain":              "kept by the machine",
}

// If merge forgets a field, the other groups do not receive it, and no other test fails.
func TestEachFieldOfARequestIsMergedOrNamedHere(t *testing.T) {
	record := func(r Request) quorum.Member {
		member, agree := merge(quorum.Member{}, []*QuorumAsked{{Request: r}})
		assert.True(t, agree)
		return member
	}
	without := record(Request{})
	for field := range reflect.TypeFor[Request]().Fields() {
		var r Request
		switch v := reflect.ValueOf(&r).Elem().FieldByIndex(field.Index); field.Type.Kind() {
		case reflect.Int64:
			v.SetInt(7)
		case reflect.Bool:
			v.SetBool(true)
		case reflect.String:
			v.SetString("7")
		default:
			assert.Fail(t, "a field of a new kind", "%s is %s", field.Name, field.Type)
		}
		_, named := notMerged[field.Name]
		assert.Equal(t, named, reflect.DeepEqual(without, record(r)),
			"%s: merge adds it to the group's record, or notMerged says why it does not", field.Name)
	}
}
