package quorum

import (
	"reflect"
	"testing"

	"github.com/stretchr/testify/assert"
)

// A field that is added to Member must be part of its State, or be compared.
func TestEveryFieldOfAMemberCounts(t *testing.T) {
	for i := range reflect.TypeFor[Member]().NumField() {
		var m Member
		field := reflect.ValueOf(&m).Elem().Field(i)
		switch field.Kind() {
		case reflect.String:
			field.SetString("x")
		case reflect.Int64:
			field.SetInt(1)
		case reflect.Uint64:
			field.SetUint(1)
		case reflect.Bool:
			field.SetBool(true)
		case reflect.Slice:
			field.Set(reflect.MakeSlice(field.Type(), 1, 1))
		default:
			t.Fatalf("%s: add its kind to this test", reflect.TypeFor[Member]().Field(i).Name)
		}
		var none Member
		name := reflect.TypeFor[Member]().Field(i).Name
		inState := m.State() != none.State()
		assert.Equal(t, inState, m.SameButState(&none), "%s", name)
		one, other := &Quorum{Members: []Member{m}}, &Quorum{Members: []Member{none}}
		assert.Equal(t, inState, one.SameMembers(other), "%s", name)
	}
}

func TestTheSameMembers(t *testing.T) {
	quorum := func(ids ...string) *Quorum {
		q := &Quorum{}
		for _, id := range ids {
			q.Members = append(q.Members, Member{ReplicaID: id})
		}
		return q
	}
	assert.True(t, quorum().SameMembers(quorum()))
	assert.True(t, quorum("a", "b").SameMembers(quorum("a", "b")))
	assert.False(t, quorum("a", "b").SameMembers(quorum("a", "c")))
	assert.False(t, quorum("a", "b").SameMembers(quorum("a")))
	assert.False(t, quorum("a").SameMembers(quorum("a", "b")))
}
